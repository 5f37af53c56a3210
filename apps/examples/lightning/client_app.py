"""The nodes' side."""

from fedbn_flwr.clientapp import ClientApp
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict

import lightning as L
from task import Net, load_data

app = ClientApp(model=Net)


def trainer(**options):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(accelerator="cpu", devices=1, **quiet, **options)


def loaders(context: Context):
    partition_id, num_partitions = context.node_config["partition-id"], context.node_config["num-partitions"]
    return load_data(partition_id, num_partitions, context.run_config["batch-size"])


@app.train()
def train(msg: Message, context: Context):
    """Train the model on local data."""
    model = Net(lr=msg.content["config"]["lr"])
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    trainloader, _ = loaders(context)
    local = trainer(max_epochs=context.run_config["local-epochs"])
    local.fit(model, trainloader)
    train_loss = local.callback_metrics["train_loss"].item()
    metrics = MetricRecord({"train_loss": train_loss, "num-examples": len(trainloader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Evaluate the model on local data."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, testloader = loaders(context)
    (measured,) = trainer().test(model, testloader, verbose=False)
    eval_loss, eval_acc = measured["test_loss"], measured["test_acc"]
    metrics = MetricRecord({"eval_loss": eval_loss, "eval_acc": eval_acc, "num-examples": len(testloader.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
