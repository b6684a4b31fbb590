"""Frames and links, in times of a bare echo of the same size.

python benchmarks/wire.py [options of splitlm bench wire]
"""

import sys

from splitlm.cli.main import main

sys.argv[1:] = ["bench", "wire", *sys.argv[1:]]
main()
