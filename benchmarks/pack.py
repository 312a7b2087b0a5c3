"""Write the records of the runs below a folder into one file, which `aidgn table` and `aidgn report` read.

python benchmarks/pack.py runs/pacs docs/results/pacs.zip
"""

import argparse

from aidgn.runs.packed import pack

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("file", help="name of the zip archive to write")
    options = parser.parse_args()
    print(f"{options.file}: {pack(options.folder, options.file)} runs")
