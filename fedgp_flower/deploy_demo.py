"""The command ``python -m fedgp_flower.deploy_demo``: a whole deployment on this machine, as ``fedgp deploy-demo``."""

import sys

from fedgp_flower.cli import main

if __name__ == "__main__":
    main(["deploy-demo", *sys.argv[1:]], wrong=1)
