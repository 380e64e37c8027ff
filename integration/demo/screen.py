# SPDX-License-Identifier: Apache-2.0
"""What the demo shows in the terminal: a table that fills turn by turn, then the verdict.

Where the output is no terminal, the lines of the turns are printed as they come and the table once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from integration.demo.conversation import Turn
from integration.demo.verdict import Pair, Verdict

WITHOUT, WITH = "without FlexKV", "with FlexKV"
NOT_YET = Text("·", style="dim")
ROUNDING = (
    "In 16-bit floating point this may be rounding: a prefix that is reused and one that is "
    "computed again differ in their last bits with vLLM's own prefix cache, too. Try "
    "[bold]--dtype float32[/] to tell."
)
NOTHING_LOADED = (
    "[bold red]FlexKV brought nothing back[/]: vLLM's own KV cache held everything (lower "
    "--kv-conversations or raise --users), or the host memory was too small (--cpu-cache-gb)."
)


class Screen:
    """The live display; a context manager. `runs` are the names of the runs in their order."""

    def __init__(self, console: Console, users: Sequence[str], turns: int) -> None:
        self._console = console
        self._rows = [(turn, user) for turn in range(1, turns + 1) for user in users]
        self._done: dict[str, list[Turn]] = {WITHOUT: [], WITH: []}
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} turns"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("", total=2 * len(self._rows))
        self._live = Live(console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._refresh()
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def say(self, what: str) -> None:
        """Show what is being done."""
        self._progress.update(self._task, description=what)
        if self._console.is_terminal:
            self._refresh()
        else:
            self._console.print(f"{what} ...")

    def add(self, run: str, turn: Turn) -> None:
        """Show a finished turn of one run."""
        self._done[run].append(turn)
        self._progress.advance(self._task)
        if self._console.is_terminal:
            self._refresh()
        else:
            self._console.print(
                f"  {run}: turn {turn.number}, {turn.user}: {turn.prompt_tokens:,} tokens, "
                f"{turn.cached_tokens:,} of them reused, first token after {turn.ttft:.2f} s",
                soft_wrap=True,
            )

    def table(self) -> Table:
        """The table as far as it is filled."""
        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("\nturn", justify="right")
        table.add_column("\nuser")
        table.add_column("prompt\ntokens", justify="right")
        for name in ("vLLM", "+ FlexKV"):
            table.add_column(f"{name}\nfirst token", justify="right")
            table.add_column("\nreused", justify="right")
        table.add_column("\nsooner", justify="right")
        table.add_column("\nanswer")
        for index, (number, user) in enumerate(self._rows):
            if index and user == self._rows[0][1]:
                table.add_row()
            table.add_row(str(number), user, *self._cells(index))
        return table

    def _cells(self, index: int) -> list[Text]:
        turns = [done[index] if index < len(done) else None for done in self._done.values()]
        without, with_flexkv = turns
        cells = [_number(without.prompt_tokens) if without else NOT_YET]
        for turn in turns:
            cells.append(Text(f"{turn.ttft:.2f} s") if turn else NOT_YET)
            cells.append(_number(turn.cached_tokens) if turn else NOT_YET)
        if without is None or with_flexkv is None:
            return [*cells, NOT_YET, NOT_YET]
        pair = Pair(without, with_flexkv)
        # A first turn has nothing to reuse: what its times differ by is no gain.
        style = "bold green" if pair.returning and pair.speedup > 1 else "dim"
        cells.append(Text(f"{pair.speedup:.1f}x", style=style))
        same = pair.identical
        cells.append(Text("identical" if same else "DIFFERENT", style="green" if same else "red"))
        return cells

    def _refresh(self) -> None:
        self._live.update(Group(self.table(), Text(), self._progress))


def _number(value: int) -> Text:
    return Text(f"{value:,}", style="dim" if value == 0 else "")


def introduce(console: Console, facts: Mapping[str, str]) -> None:
    """Print what is going to run."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, value in facts.items():
        grid.add_row(Text(name, style="bold"), Text(value))
    console.print()
    console.print(grid)
    console.print()


def show_answer(console: Console, pair: Pair, answer: str) -> None:
    """Print the answer of one turn."""
    console.print(f"[bold]turn {pair.without.number}, {pair.without.user}[/]")
    console.print(answer, markup=False)
    console.print()


def show_verdict(console: Console, verdict: Verdict, *, random: bool) -> None:
    """Print the summary; `random` if the model's answers mean nothing."""
    if verdict.different:
        turns = ", ".join(f"turn {number} of {user}" for number, user in verdict.different)
        console.print(f"[bold red]Answers differ[/]: {turns}.")
        if not random:
            console.print(ROUNDING)
    else:
        gibberish = " They are gibberish, as a random model's are." if random else ""
        console.print(
            f"[bold green]All {verdict.turns} answers are identical[/], token by token "
            f"({verdict.compared_tokens:,} tokens).{gibberish}"
        )
    console.print(
        f"A user who comes back sees the first token after [bold]{verdict.returning_with:.2f} s[/] "
        f"instead of {verdict.returning_without:.2f} s: [bold]{verdict.speedup:.0f} times sooner[/]"
        " (medians)."
    )
    console.print(
        f"A user's first turn, with nothing to reuse, should cost the same: "
        f"{verdict.first_with:.2f} s with FlexKV, {verdict.first_without:.2f} s without."
    )
    console.print(
        f"All turns to their last token: {verdict.total_with:.0f} s instead of "
        f"{verdict.total_without:.0f} s; {verdict.loaded_tokens:,} tokens came back from host "
        "memory."
    )
    if verdict.loaded_tokens == 0:
        console.print(NOTHING_LOADED)
