"""The server: one of the Strategies, with plain keyword arguments."""

from flwr.serverapp import ServerApp

from fedgp_flower import strategies

app = ServerApp()


@app.main()
def main(grid, context):
    """Train, and print how well held-out rows are predicted."""
    config = context.run_config
    strategy = strategies.FSGP(num_inducing=15, steps=20, sites=config["sites"], seed=1)
    result = strategy.start(grid, num_rounds=config["num-rounds"])
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: RMSE {metrics['test_rmse']:.3f}, 90 % intervals hold {metrics['test_coverage_90']:.0%}")
    print("inducing points:", result.arrays["values.inducing.locations"].numpy().shape)
