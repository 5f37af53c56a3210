"""A ClientApp whose handlers stay a user's own, and obey the strategies of this project.

app = ClientApp(model=Net)          # instead of Flower's ClientApp()

@app.train()
def train(message, context): ...    # as before
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import Client, NumPyClient
from torch import nn

from fedbn_flwr import wire
from fedbn_flwr.client import Reply
from fedbn_flwr.client.own_loop_client import Handler, OwnLoopClient, TrainingData
from fedbn_flwr.clientapp.bn_client_app import NodeApp, answer, make_message
from fedbn_flwr.transports.message_client import handle_layerwise_message

Decorator = Callable[[Handler], Handler]


class ClientApp(NodeApp):
    """Flower's ClientApp, whose training and evaluation handlers obey instructions of this
    project's strategies.

    Handlers are what they are under Flower's own strategies: they find the model's arrays and the
    configuration in the message, train with a loop of their own, and reply with arrays and metrics.
    Whatever the strategy asks for is done around that loop (`fedbn_flwr.client.own_loop`).

    - `model` makes a model with the entries of the one that handlers train: its class, for
      instance.
    - `num_examples` gives a node's weight in a layer-wise step, which is needed before the handler
      has replied; without it, the number of samples in the first mini-batch.
    - `loss_key` is the name under which the handler's metrics hold the mean training loss.
    """

    def __init__(
        self,
        client_fn: Any = None,
        mods: Any = None,
        *,
        model: Callable[[], nn.Module],
        num_examples: Callable[[Context], int] | None = None,
        loss_key: str = wire.TRAIN_LOSS,
    ) -> None:
        super().__init__(client_fn, mods)
        self._make_model = model
        self._num_examples = num_examples
        self._loss_key = loss_key
        super().query("describe")(self._describe)
        self._training_data: TrainingData | None = None
        super().train("gather")(partial(self._act, OwnLoopClient.gather, _no_handler))

    @cached_property
    def structure(self) -> nn.Module:
        """A model that says which entries there are; its values are not used."""
        return self._make_model()

    def train(self, action: str = "default", *, mods: Any = None) -> Decorator:
        """Register a training handler; the default one also takes layer-wise steps."""

        def decorate(handler: Handler) -> Handler:
            if action != "default":
                NodeApp.train(self, action, mods=mods)(handler)
            else:
                NodeApp.train(self, "layerwise", mods=mods)(partial(self._train_in_step, handler))
                NodeApp.train(self, mods=mods)(partial(self._act, OwnLoopClient.train, handler))
            return handler

        return decorate

    def training_data(self) -> Callable[[TrainingData], TrainingData]:
        """Register a function of message and context that returns the node's training data, in
        batches: pairs of inputs and labels, as of a DataLoader, or dictionaries.

        Strategies that need more of them than training run the model over these: exact statistics,
        the nodes' own, a head in closed form.
        """

        def decorate(function: TrainingData) -> TrainingData:
            self._training_data = function
            return function

        return decorate

    def evaluate(self, action: str = "default", *, mods: Any = None) -> Decorator:
        """Register an evaluation handler."""
        register = super().evaluate(action, mods=mods)

        def decorate(handler: Handler) -> Handler:
            register(partial(self._act, OwnLoopClient.test, handler))
            return handler

        return decorate

    def _client(self, handler: Handler, message: Message, context: Context) -> OwnLoopClient:
        weight = None
        if self._num_examples:
            weight = self._num_examples(context)
        return OwnLoopClient(
            self.structure, handler, message, context, weight, self._loss_key, self._training_data
        )

    def _act(
        self, act: Callable[..., Reply], handler: Handler, message: Message, context: Context
    ) -> Message:
        client = self._client(handler, message, context)
        return answer(client, partial(act, client), message, flowers=False)

    def _train_in_step(self, handler: Handler, message: Message, context: Context) -> Message:
        make_client = partial(self._client, handler, message)
        return make_message(
            handle_layerwise_message(message.content, context, make_client), message
        )

    def _describe(self, message: Message, context: Context) -> Message:
        reply: Reply = self._client(_no_handler, message, context).describe()
        return make_message(reply, message)


def numpy_client_app(
    client_fn: Callable[[Context], NumPyClient], model: Callable[[], nn.Module], **options: Any
) -> ClientApp:
    """Make a ClientApp of a `client_fn` for Flower's NumPyClient.

    Names and dtypes of the model's entries are kept.

    `client_fn` returns a NumPyClient; what its `to_client` returns is taken, too. `options` are
    those of `ClientApp`. A `Client` with messages of its own, which has no lists of arrays, is a
    TypeError.
    """
    app = ClientApp(model=model, **options)

    def make(context: Context) -> NumPyClient:
        client = client_fn(context)
        inner: NumPyClient = getattr(client, "numpy_client", client)
        if isinstance(inner, Client):
            raise TypeError(
                f"client_fn returned a {type(inner).__name__}, which is a flwr.client.Client; "
                "numpy_client_app takes a NumPyClient: make it one, or train in a handler of "
                "ClientApp(model=...)"
            )
        return inner

    @app.train()
    def train(message: Message, context: Context) -> Message:
        sent, config = _arrays_and_config(message)
        arrays, count, metrics = make(context).fit(sent.to_numpy_ndarrays(), config)
        content = RecordDict({wire.ARRAYS: _named(arrays, sent), **_metric_records(metrics, count)})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        sent, config = _arrays_and_config(message)
        loss, count, metrics = make(context).evaluate(sent.to_numpy_ndarrays(), config)
        return Message(
            RecordDict({**_metric_records({wire.EVAL_LOSS: loss, **metrics}, count)}),
            reply_to=message,
        )

    return app


def _arrays_and_config(message: Message) -> tuple[ArrayRecord, dict[str, Any]]:
    arrays, config = wire.record_names(message.content)
    return message.content.array_records[arrays], dict(message.content.config_records[config])


def _named(arrays: list[np.ndarray], sent: ArrayRecord) -> ArrayRecord:
    """Name a client's list of arrays; it may have made a counter a float, or a 0-d array a
    number.
    """
    if len(arrays) != len(sent):
        raise ValueError(f"`fit` returned {len(arrays)} arrays, and was given {len(sent)}")
    return ArrayRecord(
        {
            name: Array(np.asarray(array).astype(before.dtype).reshape(before.shape))
            for (name, before), array in zip(sent.items(), arrays, strict=True)
        }
    )


def _metric_records(values: dict[str, Any], count: int) -> dict[str, MetricRecord | ConfigRecord]:
    values = {
        key: value.item() if isinstance(value, np.generic) else value
        for key, value in values.items()
    }
    numbers = {
        key: value
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    others = {key: value for key, value in values.items() if key not in numbers}
    return {
        wire.METRICS: MetricRecord({**numbers, wire.NUM_EXAMPLES: int(count)}),
        "others": ConfigRecord(others),
    }


def _no_handler(message: Message, context: Context) -> Message:
    raise NotImplementedError(message.metadata.message_type)
