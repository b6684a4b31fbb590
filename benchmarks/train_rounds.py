"""Memory over 200 rounds, and graphs that are kept.

python benchmarks/train_rounds.py [options of splitlm bench train]
"""

import sys

from splitlm.cli.main import main

sys.argv[1:] = ["bench", "train", "--only", "rounds", *sys.argv[1:]]
main()
