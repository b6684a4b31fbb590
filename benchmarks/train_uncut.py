"""Split training, a core for each party, against the uncut loop on both.

python benchmarks/train_uncut.py [options of splitlm bench train]
"""

import sys

from splitlm.cli.main import main

sys.argv[1:] = ["bench", "train", "--only", "uncut", *sys.argv[1:]]
main()
