"""Two stages against torch.distributed.pipelining.

python benchmarks/train_stages.py [options of splitlm bench train]
"""

import sys

from splitlm.cli.main import main

sys.argv[1:] = ["bench", "train", "--only", "stages", *sys.argv[1:]]
main()
