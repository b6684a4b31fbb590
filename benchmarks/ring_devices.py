"""Three simulated devices: four sessions against one.

python benchmarks/ring_devices.py [MODEL] [options of splitlm bench ring]
"""

import sys

from splitlm.cli.main import main

sys.argv[1:] = ["bench", "ring", "--only", "devices", *sys.argv[1:]]
main()
