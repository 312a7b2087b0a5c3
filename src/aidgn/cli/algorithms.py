"""aidgn algorithms"""

import inspect

import click


@click.command(
    epilog="""\b
Examples:
  aidgn algorithms
  aidgn algorithms AIDGN
  aidgn algorithms AIDGN --small""",
)
@click.argument("name", required=False)
@click.option("--small", is_flag=True, help="Show the defaults for images of 28 to 64 pixels instead of 224.")
def algorithms(name: str | None, small: bool) -> None:
    """List the algorithms, or show the objective, hyper-parameters and search space of the algorithm NAME."""
    from rich.markup import escape
    from rich.table import Table

    from aidgn.algorithms import ALGORITHMS, find
    from aidgn.algorithms.base import COMMON
    from aidgn.errors import short
    from aidgn.progress import wide_console

    console = wide_console(120)
    if name is None:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for head in ("name", "what it does", "paper", "hyper-parameters"):
            table.add_column(head, overflow="fold")
        for algorithm in ALGORITHMS.values():
            table.add_row(
                algorithm.name(),
                algorithm.title,
                algorithm.paper,
                ", ".join(key for key in algorithm.search_space if key not in COMMON),
            )
        console.print(table)
        console.print(
            f"\nAll have {', '.join(COMMON)} too. `aidgn algorithms NAME` shows the objective and search space.\n"
            "NAME can be an algorithm in a file of yours: path/to/file.py:Class.",
            highlight=False,
        )
        return
    algorithm = find(name)
    console.print(algorithm.name(), style="bold", end="")
    console.print(f": {algorithm.title}\n{algorithm.paper}\n", highlight=False, markup=False)
    console.print(inspect.cleandoc(algorithm.__doc__ or ""), highlight=False, markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold", title=None)
    for head in ("\nhyper-parameter", "\ndefault", "\nsearched"):
        table.add_column(head)
    for key, (default, distribution) in algorithm.space("", small).items():
        table.add_row(escape(key), escape(short(default)), escape(distribution.text))
    console.print(table)
    if algorithm.lr_milestones:
        console.print(f"\n{describe_milestones()}", highlight=False)
    console.print(
        "\nFor images of 28 to 64 pixels; without --small, for 224."
        if small
        else "\nFor images of 224 pixels; --small shows those for 28 to 64, such as digits.",
        highlight=False,
    )


def describe_milestones() -> str:
    """Say on which data sets algorithms with the paper's milestones halve the learning rate."""
    from aidgn.data import DATASETS

    places: dict[str, list[str]] = {}
    for name, info in DATASETS.items():
        if info.lr_milestones:
            places.setdefault(" and ".join(f"{step:,}" for step in info.lr_milestones), []).append(name)
    halvings = "; ".join(f"at steps {steps} on {' and '.join(names)}" for steps, names in places.items())
    return f"The learning rate is halved {halvings}, as in the paper, unless --schedule is given."
