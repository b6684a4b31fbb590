"""The lanes between an owner and a worker, beside a bare socket.

python benchmarks/train_link.py [options of splitlm bench train]
"""

import sys

from splitlm.cli.main import main

sys.argv[1:] = ["bench", "train", "--only", "link", *sys.argv[1:]]
main()
