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
EXAMPLE = "with vLLM's ExampleConnector"
RESTARTED = "with FlexKV, killed and started again"
NOT_YET = Text("·", style="dim")
ROUNDING = (
    "In 16-bit floating point this may be rounding: a prefix that is reused and one that is "
    "computed again differ in their last bits with the engine's own prefix cache, too. Try "
    "[bold]--dtype float32[/] to tell."
)
NOTHING_LOADED = (
    "[bold red]FlexKV brought nothing back[/]: the engine's own KV cache held everything (lower "
    "--kv-conversations or raise --users), or the host memory was too small (--cpu-cache-gb)."
)


class Screen:
    """The live display; a context manager. `runs` are the names of the runs in their order,
    `engine` that of the engine."""

    def __init__(
        self,
        console: Console,
        users: Sequence[str],
        turns: int,
        runs: Sequence[str],
        engine: str = "vLLM",
    ) -> None:
        self._console = console
        self._engine = engine
        self._rows = [(turn, user) for turn in range(1, turns + 1) for user in users]
        self._restarted = [(turns, user) for user in users] if RESTARTED in runs else []
        self._done: dict[str, list[Turn]] = {run: [] for run in runs}
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} turns"),
            TimeElapsedColumn(),
            console=console,
        )
        held = [self._restarted if run == RESTARTED else self._rows for run in runs]
        self._task = self._progress.add_task("", total=sum(map(len, held)))
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
        for name in (self._engine, "+ FlexKV"):
            table.add_column(f"{name}\nfirst token", justify="right")
            table.add_column("\nreused", justify="right")
        if EXAMPLE in self._done:
            table.add_column("+ Example\nfirst token", justify="right")
        table.add_column("\nsooner", justify="right")
        table.add_column("\nanswer")
        for index, (number, user) in enumerate(self._rows):
            if index and user == self._rows[0][1]:
                table.add_row()
            example = self._turn(EXAMPLE, index)
            table.add_row(
                str(number),
                user,
                *self._cells(self._turn(WITHOUT, index), self._turn(WITH, index), example),
            )
        for index, (number, user) in enumerate(self._restarted):
            if not index:
                table.add_row()
            # The last turn once more.
            without = self._turn(WITHOUT, len(self._rows) - len(self._restarted) + index)
            cells = self._cells(without, self._turn(RESTARTED, index), None)
            table.add_row(f"kill -9, {number}", user, *cells)
        return table

    def _turn(self, run: str, index: int) -> Turn | None:
        done = self._done.get(run, [])
        return done[index] if index < len(done) else None

    def _cells(
        self, without: Turn | None, with_flexkv: Turn | None, example: Turn | None
    ) -> list[Text]:
        cells = [_number(without.prompt_tokens) if without else NOT_YET]
        for turn in (without, with_flexkv):
            cells.append(Text(f"{turn.ttft:.2f} s") if turn else NOT_YET)
            cells.append(_number(turn.cached_tokens) if turn else NOT_YET)
        if EXAMPLE in self._done:
            cells.append(Text(f"{example.ttft:.2f} s") if example else NOT_YET)
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
        console.print(f"[bold red]Answers differ[/]: {', '.join(verdict.different)}.")
        if not random:
            console.print(ROUNDING)
    else:
        gibberish = " They are gibberish, as a random model's are." if random else ""
        console.print(
            f"[bold green]All {verdict.turns} answers are identical[/], token by token "
            f"({verdict.compared_tokens:,} tokens).{gibberish}"
        )
    console.print(
        f"A user who comes back sees the first token after "
        f"[bold]{verdict.returning_with.middle:.2f} s[/] instead of "
        f"{verdict.returning_without.middle:.2f} s: [bold]{verdict.speedup:.0f} times sooner[/]"
        " (medians)."
    )
    _show_restart(console, verdict)
    if verdict.returning_example is not None:
        console.print(
            f"vLLM's ExampleConnector, which knows whole prompts only and not their beginnings: "
            f"{verdict.returning_example}."
        )
    console.print(
        f"A user's first turn has nothing to reuse. It took {verdict.first_with} with FlexKV, "
        f"{verdict.first_without} without (medians, fastest to slowest)."
    )
    console.print(
        f"All turns to their last token: {verdict.total_with:.0f} s instead of "
        f"{verdict.total_without:.0f} s; {verdict.loaded_tokens:,} tokens came back from host "
        "memory."
    )
    if verdict.loaded_tokens == 0:
        console.print(NOTHING_LOADED)
    _show_load(console, verdict)


def _show_load(console: Console, verdict: Verdict) -> None:
    shares = ", ".join(f"{100 * share:.0f} % {run}" for run, share in verdict.others.items())
    told = f"Other processes took a share of the cores: {shares}."
    if verdict.is_fair:
        console.print(told, style="dim")
    else:
        console.print(f"[bold red]These times are not fair.[/] {told} Run it on an idle machine.")


def _show_restart(console: Console, verdict: Verdict) -> None:
    if verdict.restarted_with is None:
        return
    console.print(
        f"After kill -9 and a new start the last turn once more: {verdict.restarted_with} instead "
        f"of {verdict.restarted_without}; {verdict.restored_tokens:,} tokens came back from disk."
    )
    if verdict.restored_tokens == 0:
        console.print("[bold red]FlexKV found nothing on disk[/] after the restart.")
