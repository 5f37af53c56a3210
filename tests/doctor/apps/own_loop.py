"""No strategy: the ServerApp asks and averages by itself."""

from common import Net, plain_client
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context):
    state = Net().state_dict()
    for _ in range(int(context.run_config["num-server-rounds"])):
        for kind in ("train", "evaluate"):
            content = {"arrays": ArrayRecord(state), "config": ConfigRecord({})}
            asked = [Message(RecordDict(content), node, kind) for node in grid.get_node_ids()]
            replies = [reply.content for reply in grid.send_and_receive(asked)]
            if kind == "train":
                states = [reply["arrays"].to_torch_state_dict() for reply in replies]
                state = {name: sum(each[name] for each in states) / len(states) for name in state}


client = plain_client()
EXPECTED = {"averaged", "counters"}
