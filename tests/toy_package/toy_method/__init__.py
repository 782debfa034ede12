"""Federated Bayesian linear regression by sums: a method in a package of its own."""

from fedgp_flower.run.registry import Method

METHOD = Method(
    summary="Bayesian linear regression whose noise is fitted by expectation maximisation",
    paper="Bishop, Pattern recognition and machine learning (2006), Section 9.3.4",
    options="toy_method.shared:ToyOptions",
    strategy="toy_method.strategy:Toy",
    client="toy_method.site:ToyClient",
    posterior="toy_method.site:saved_model",
    panels="toy_method.site:panels",
)
