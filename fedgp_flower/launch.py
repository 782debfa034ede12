"""The command ``python -m fedgp_flower.launch``: a simulated federation from start to end, as ``fedgp launch``."""

import sys

from fedgp_flower.cli import main

if __name__ == "__main__":
    main(["launch", *sys.argv[1:]], wrong=1)
