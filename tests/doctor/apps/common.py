"""What the apps share: two kinds of pictures on each node, a network with BN, plain PyTorch loops."""

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.norm(self.conv2(x)))
        return self.head(x.mean((2, 3)))


def load_data(context: Context, samples: int = 200, channels: int = 1, size: int = 8) -> DataLoader:
    node = int(context.node_config["partition-id"])
    generator = torch.Generator().manual_seed(node)
    labels = torch.randint(2, (samples,), generator=generator)
    images = torch.randn(samples, channels, size, size, generator=generator)
    images = images + labels.reshape(-1, 1, 1, 1) * 0.5
    return DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)


def train(net: nn.Module, loader: DataLoader) -> None:
    net.train()
    step_through(net, loader)


def step_through(net: nn.Module, loader: DataLoader) -> None:
    learning = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.05)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()


def test(net: nn.Module, loader: DataLoader) -> float:
    net.eval()
    right = 0
    with torch.no_grad():
        for images, labels in loader:
            right += int((net(images).argmax(1) == labels).sum())
    return right / len(getattr(loader, "dataset", loader))


def reply(message: Message, loader: DataLoader, **content: object) -> Message:
    metrics = MetricRecord({"num-examples": len(getattr(loader, "dataset", loader))})
    return Message(RecordDict({**content, "metrics": metrics}), reply_to=message)


def plain_client(make=Net, fit=train, score=test, data=load_data) -> ClientApp:
    app = ClientApp()

    @app.train()
    def _(message: Message, context: Context) -> Message:
        net = make()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        fit(net, loader := data(context))
        return reply(message, loader, arrays=ArrayRecord(net.state_dict()))

    @app.evaluate()
    def _(message: Message, context: Context) -> Message:
        net = make()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        score(net, loader := data(context))
        return reply(message, loader)

    return app


def plain_server(
    make=Net, strategy=FedAvg, arrays=None, evaluate=None, takes_context=False
) -> ServerApp:
    app = ServerApp()

    @app.main()
    def _(grid: Grid, context: Context) -> None:
        torch.manual_seed(0)
        begun: Strategy = strategy()
        net = make(context) if takes_context else make()
        begun.start(
            grid=grid,
            initial_arrays=arrays() if arrays else ArrayRecord(net.state_dict()),
            num_rounds=int(context.run_config["num-server-rounds"]),
            train_config=ConfigRecord({"lr": 0.05}),
            evaluate_fn=evaluate,
        )

    return app
