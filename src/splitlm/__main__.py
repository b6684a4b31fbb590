"""``python -m splitlm`` is the ``splitlm`` command."""

from splitlm.cli.main import main

main()
