"""Bytes on the lanes against the tensors in them.

python benchmarks/train_bytes.py [options of splitlm bench train]
"""

import sys

from splitlm.cli.main import main

sys.argv[1:] = ["bench", "train", "--only", "bytes", *sys.argv[1:]]
main()
