"""The nodes' side."""

from fedbn_flwr.clientapp import ClientApp
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict

from task import Net, load_data
from task import test as test_fn
from task import train as train_fn

app = ClientApp(model=Net)


def loaders(context: Context):
    partition_id, num_partitions = context.node_config["partition-id"], context.node_config["num-partitions"]
    return load_data(partition_id, num_partitions, context.run_config["batch-size"])


def load_local_head(model: Net, context: Context) -> None:
    """Put this node's own classification head into the model, if it has trained one."""
    if "head" in context.state:
        model.fc.load_state_dict(context.state["head"].to_torch_state_dict())


@app.train()
def train(msg: Message, context: Context):
    """Train the model on local data."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    load_local_head(model, context)
    trainloader, _ = loaders(context)
    train_loss = train_fn(model, trainloader, context.run_config["local-epochs"], msg.content["config"]["lr"])
    context.state["head"] = ArrayRecord(model.fc.state_dict())
    metrics = MetricRecord({"train_loss": train_loss, "num-examples": len(trainloader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Evaluate the model on local data."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    load_local_head(model, context)
    _, testloader = loaders(context)
    eval_loss, eval_acc = test_fn(model, testloader)
    metrics = MetricRecord({"eval_loss": eval_loss, "eval_acc": eval_acc, "num-examples": len(testloader.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
