"""A site's own model in a file: what it has evaluated, with the entries that never leave the
site.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Context, Message, MessageType
from flwr.clientapp.typing import ClientAppCallable
from torch import nn

from fedbn_flwr import state, wire
from fedbn_flwr.client.node_memory import Memory
from fedbn_flwr.clientapp.bn_client_app import read_message
from fedbn_flwr.experiments.experiment import import_plugins, resolve
from fedbn_flwr.experiments.material import Form, data_form, fresh_model, load_data
from fedbn_flwr.plugins import extra
from fedbn_flwr.server.replies import lacks_state
from fedbn_flwr.state import State
from fedbn_flwr.whole_files import write_bytes
from fedbn_flwr.wire.history import History, site_number
from fedbn_flwr.wire.site_data import DATA_SHAPE

#: where a site names the folder: in its SuperNode's node configuration, or in the environment of
#: its ClientApps
NODE_KEY = "models-dir"
MODELS_VARIABLE = "FEDBN_FLWR_MODELS"
#: its name, in its node configuration; without one, its number stands for it
NAME_KEY = "site"
SUFFIX = ".safetensors"


class OwnModel(NamedTuple):
    """A model from a file, and what it was trained under."""

    model: nn.Module
    #: every option of the run; `mean` and `std` normalize the model's inputs, `classes` names its
    #: outputs
    options: Mapping[str, Any]
    #: the run, the round, the site and the shape of an image
    about: Mapping[str, Any]


def export_model(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Write the model that the site evaluates to `FOLDER/RUN/SITE.safetensors`: a mod for the
    ClientApp.

    With FedBN and its like it is the site's own, with the BN that stays here. Each evaluation
    replaces the file as a whole; the last one follows the last round. Does nothing where the site
    names no folder.
    """
    folder = str(context.node_config.get(NODE_KEY) or os.environ.get(MODELS_VARIABLE, ""))
    kind = message.metadata.message_type.partition(".")[0]
    if not folder or kind != MessageType.EVALUATE:
        return call_next(message, context)
    received, instruction = read_message(message)
    config: Any = message.content[wire.record_names(message.content)[1]]
    reply = call_next(message, context)
    if reply.has_content() and not lacks_state(reply):
        own: State = {}
        if instruction.stays != "none" or instruction.gather:
            own = Memory(context.state).recall(wire.STAYS)
        run = History.read(config, context).first
        site = str(context.node_config.get(NAME_KEY) or site_number(context))
        about = {
            "run": run,
            "round": instruction.server_round,
            "site": site,
            "shape": config.get(DATA_SHAPE, []),
        }
        options = resolve(context.run_config, federation=True).to_mapping()
        path = Path(folder, run, f"{site}{SUFFIX}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with extra("models"):
            from safetensors.torch import save

        model = {
            name: value.contiguous() for name, value in {**received[wire.ARRAYS], **own}.items()
        }
        write_bytes(
            path, bytes(save(model, {"options": json.dumps(options), "about": json.dumps(about)}))
        )
    return reply


def load_own_model(path: str | Path, plugins: str = "") -> OwnModel:
    """Return the model of a file of `export_model`, in evaluation mode.

    `plugins` are modules that it may name.
    """
    import_plugins(plugins)
    with extra("models"):
        from safetensors import safe_open

    try:
        with safe_open(str(path), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            options, about = (json.loads(file.metadata()[key]) for key in ("options", "about"))
    except Exception as error:
        raise ValueError(f"{path} is no file of export_model: {error}") from error
    config = resolve(options, federation=True, read_from=str(path)).config.but(init_from="")
    shape = about["shape"]
    if shape:
        form = Form.of(len(config.data.classes), shape)
    else:
        form = data_form(load_data(config.data))
    model = fresh_model(config.model, form, config.seed).eval()
    state.load(model, tensors)
    return OwnModel(model, options, about)
