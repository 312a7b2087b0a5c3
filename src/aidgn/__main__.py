"""python -m aidgn"""

from aidgn.cli import main

main()
