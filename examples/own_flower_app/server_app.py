"""The server: the Strategy that ``--run-config "strategy='SGPR'"`` names."""

from flwr.serverapp import ServerApp

from fedgp_flower import strategies

app = ServerApp()


@app.main()
def main(grid, context):
    """Train, and print how well held-out rows are predicted."""
    config = context.run_config
    strategy = getattr(strategies, config["strategy"])(sites=config["sites"], seed=1)
    result = strategy.start(grid, num_rounds=config["num-rounds"])
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: RMSE {metrics['test_rmse']:.3f}, 90 % intervals hold {metrics['test_coverage_90']:.0%}")
    print("trained:", ", ".join(f"{name} {array.numpy().shape}" for name, array in result.arrays.items()))
