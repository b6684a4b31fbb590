"""Two unequal workers against the sum of what each does alone.

python benchmarks/train_unequal.py [options of splitlm bench train]
"""

import sys

from splitlm.cli.main import main

sys.argv[1:] = ["bench", "train", "--only", "unequal", *sys.argv[1:]]
main()
