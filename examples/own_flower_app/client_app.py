"""The sites: a federated GP of rows that this function reads."""

import numpy as np

from fedgp_flower import make_client_app


def load_data(context):
    """The machine's own file, a column per input and the target last; in a simulation, rows made up."""
    if path := context.node_config.get("data-path"):
        table = np.loadtxt(path, delimiter=",", skiprows=1)
        return table[:, :-1], table[:, -1]
    draw = np.random.default_rng(int(context.node_config["partition-id"]))
    x = draw.uniform(-3, 3, (60, 2))
    return x, np.sin(x[:, 0]) + 0.1 * x[:, 1] ** 2 + 0.1 * draw.standard_normal(60)


app = make_client_app(None, load_data)  # whichever method the server runs; a name allows that one alone
