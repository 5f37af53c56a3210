# One image for all of a federation's services (docker-compose.yml) and for the command `fedbn-flwr`.
#
# PyTorch is the build for CPUs. With CUDA: docker build --build-arg TORCH_INDEX=https://pypi.org/simple -t fedbn-flwr .

# what is installed, apart from the rest of pyproject.toml: the layer with PyTorch stays while these lines do
FROM python:3.11-slim-bookworm AS requirements
COPY pyproject.toml ./
RUN python -c "import tomllib; f = tomllib.load(open('pyproject.toml', 'rb')); p = f['project']; e = p['optional-dependencies']; print(*(n for n in p['dependencies'] + e['cli'] + e['models'] + e['data'] + e['tensorboard'] + e['timm'] + f['build-system']['requires'] if not n.startswith('fedbn-flwr')), sep='\n')" > requirements.txt

FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends nginx-light \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /srv/build
# a second index: of one version, pip prefers the build whose name ends in +cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=requirements requirements.txt ./
# their versions, and those of what they need; `make lock` renews them
COPY image.lock ./
# tests and C++ headers of packages are a tenth of the image
RUN python -m pip install --no-cache-dir --extra-index-url ${TORCH_INDEX} -c image.lock -r requirements.txt \
    && cd "$(python -c 'import torch; print(torch.__path__[0])')/.." \
    && rm -rf torch/test torch/include pyarrow/include \
    && find . -type d -name tests -prune -exec rm -rf {} +

COPY README.md LICENSE hatch_build.py pyproject.toml docker-compose.yml ./
COPY fedbn_flwr fedbn_flwr
COPY strategies strategies
COPY recipes recipes
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation .

# nothing is reported home or installed at run time; the SuperExec asks for tasks ten times a second
ENV PYTHONUNBUFFERED=1 \
    FLWR_TELEMETRY_ENABLED=0 \
    FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 \
    FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1 \
    OMP_NUM_THREADS=1 \
    HOME=/srv/home \
    FLWR_HOME=/srv/home/flwr

# whichever user the services run as
RUN install -d -m 1777 /srv/home /srv/state /srv/results
WORKDIR /srv/home
USER 10001:10001

HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 CMD ["python", "-m", "fedbn_flwr.deployment.health"]
ENTRYPOINT ["fedbn-flwr"]
CMD ["--help"]
