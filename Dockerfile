# One image for all of a federation's services (docker-compose.yml): Flower, this project and the proxy.
# CPU-only or other builds of PyTorch: docker build --build-arg PIP_ARGS="--index-url ..." .
FROM python:3.11-slim-bookworm

# nothing is reported home or installed at run time; the SuperExec asks for tasks ten times a second
ENV PYTHONUNBUFFERED=1 \
    FLWR_TELEMETRY_ENABLED=0 \
    FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 \
    FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1 \
    OMP_NUM_THREADS=1 \
    HOME=/srv/home \
    FLWR_HOME=/srv/home/flwr

RUN apt-get update \
    && apt-get install --yes --no-install-recommends nginx-light \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /srv/build
ARG PIP_ARGS=""

# what it depends on first: a layer that stays when only the code changes
COPY pyproject.toml ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; e = p['optional-dependencies']; print(*(n for n in p['dependencies'] + e['cli'] + e['models'] + e['data'] if not n.startswith('fedbn-flwr')), sep='\n')" > requirements.txt \
    && python -m pip install --no-cache-dir ${PIP_ARGS} -r requirements.txt

COPY README.md LICENSE docker-compose.yml ./
COPY fedbn_flwr fedbn_flwr
COPY strategies strategies
COPY recipes recipes
RUN python -m pip install --no-cache-dir --no-deps .

# whichever user the services run as
RUN install -d -m 1777 /srv/home /srv/state /srv/results
WORKDIR /srv/home
USER 10001:10001

HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 CMD ["python", "-m", "fedbn_flwr.deployment.health"]
ENTRYPOINT ["fedbn-flwr"]
CMD ["--help"]
