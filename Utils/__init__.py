"""What all scripts share. No script gets past this line where Python is too old to read what comes next."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  whoever calls a script may do so with any
    sys.exit("Python 3.11 or newer is needed, %s is %s.%s: install a newer one, or name it (make: PYTHON=...)"
             % ((sys.executable,) + sys.version_info[:2]))
