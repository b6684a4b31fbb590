"""One block moves there and back: what it adds to a noop barrier, beside stop-and-copy.

python benchmarks/migrate_shift.py [MODEL] [options of splitlm bench migrate]
"""

import sys

from splitlm.cli.main import main

sys.argv[1:] = ["bench", "migrate", "--only", "shift", *sys.argv[1:]]
main()
