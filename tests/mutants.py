"""Break one formula at a time and see whether the fast tests notice: ``python tests/mutants.py [NUMBER …]``.

Every mutant is a piece of text that stands once in the application, what replaces it (a wrong sign, a missing ½, a
factor counted twice), and the tests that must fail. The application and the tests are copied for each mutant. The exit
status is 1 if a mutant survives or its text is no longer there.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUMS = "statistics sgpr"
MUTANTS = (
    # the bound of all rows from sums, its gradient and its posterior
    ("= 2 * factor.diagonal().log().sum()", "= factor.diagonal().log().sum()", SUMS),
    ("len(factor) + trace - left", "len(factor) - trace - left", SUMS),
    ("(by_gram / (2 * noise)).numpy()", "(by_gram / noise).numpy()", SUMS),
    ("factor)[:, 0] / noise\n    return WhitenedPosterior", "factor)[:, 0]\n    return WhitenedPosterior", SUMS),
    ("(spectrum / grown).sum(1) - (weights", "(spectrum / grown).sum(1) + (weights", SUMS),
    ("sums.projection * math.sqrt(amplitude)", "sums.projection * amplitude", SUMS),
    ("2 * PENALTY * (", "PENALTY * (", SUMS),
    # the rows of a site
    ("2 * by_points if both else by_points", "by_points", SUMS),
    ("towards = moved - products[-1]", "towards = moved + products[-1]", SUMS),
    # other likelihoods
    ("alpha, -2 * slope", "alpha, -slope", "svgp likelihoods"),
    ("numel() + log_determinant)", "numel() - log_determinant)", "svgp"),
    ("targets * mean - (mean + variance / 2).exp()", "targets * mean - (mean + variance).exp()", "likelihoods svgp"),
    ("+ v) * (b / 2 - a).exp()", "+ v) * (b - a).exp()", "likelihoods"),
    ("return m, v + (a + b / 2).exp()", "return m, v + (a - b / 2).exp()", "likelihoods"),
    ("-beta.sum_to_size(prior.shape) / 2", "-beta.sum_to_size(prior.shape)", "svgp"),
    ("* (2 * spread * by_spread)[:, None]", "* (spread * by_spread)[:, None]", "fitc"),
    # agreement of the sites, scores, baselines
    ("2 * gap * residual + rows * gap**2)", "2 * gap * residual)", "preparation"),
    ("parts = -0.5 * z**2 - np.log(sds)", "parts = -(z**2) - np.log(sds)", "metrics"),
    ("(2 * sds / math.sqrt(math.pi))", "(2 * sds / math.pi)", "metrics"),
    ("0.5 * tried @ penalty @ tried)\n        if now <", "tried @ penalty @ tried)\n        if now <", "linear"),
    # a shared trend with deviations
    ("symmetric(curvature + 0.5 * whole", "symmetric(curvature + whole", "hierarchical_gp"),
    (".log().sum() + 0.5 * sums.shift @ mean", ".log().sum() + sums.shift @ mean", "hierarchical_gp"),
    # factors and barycentres
    ("-0.5 * torch.cholesky_inverse(L))", "-torch.cholesky_inverse(L))", "factors pvi"),
)


def place_of(text: str) -> Path:
    """The one file of the application that holds a text.

    Raises:
        LookupError: if there is none, or the text stands more than once.
    """
    files = [path for name in ("fedgp_flower", "strategies") for path in (ROOT / name).rglob("*.py")]
    found = [path for path in files for _ in range(path.read_text(encoding="utf-8").count(text))]
    if len(found) != 1:
        raise LookupError(f"{len(found)} places with {text!r}")
    return found[0].relative_to(ROOT)


def tried(mutant: tuple[str, str, str]) -> tuple[bool, str]:
    """Whether the tests catch a mutant, and the first of them that does."""
    text, changed, names = mutant
    try:
        place = place_of(text)
    except LookupError as error:
        return False, str(error)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("fedgp_flower", "strategies", "tests", "simulations"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / place).write_text((copy / place).read_text(encoding="utf-8").replace(text, changed), encoding="utf-8")
        tests = [str(path) for name in names.split() for path in sorted((copy / "tests").glob(f"test_{name}.py"))]
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        variables = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=copy, env=variables, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return bool(failed), failed[0] if failed else f"survives {names}"


def main() -> None:
    """Try the mutants, two at a time, and print a line for each."""
    chosen = [MUTANTS[int(word) - 1] for word in sys.argv[1:]] or list(MUTANTS)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(tried, chosen))
    for number, (mutant, (caught, words)) in enumerate(zip(chosen, results, strict=True), 1):
        print(f"{number:2} {'caught' if caught else 'ALIVE '} {mutant[0][:60]!r}: {words[:110]}")
    raise SystemExit(not all(caught for caught, _ in results))


if __name__ == "__main__":
    main()
