"""`barnraise audit LINK` audits a run on this computer; `audit verify` checks evidence by computing it once more."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from node.commands.link_argument import link_argument, parse_link
from node.commands.members import auditor_options, state_folder
from node.compute.devices.choice import DeviceChoice
from protocol.drive.limits import LineLimits


class _LinkOrCommand(click.Group):
    """`audit LINK` is short for `audit run LINK`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {*self.commands, *ctx.help_option_names}
        return super().parse_args(ctx, args if not args or args[0] in known else ["run", *args])


@click.group(cls=_LinkOrCommand)
def audit() -> None:
    """Audit a run on a computer of yours, or check what audits have found: `audit LINK`, `audit verify FILE`."""


@audit.command()
@link_argument
@auditor_options
def run(
    link: str | None,
    state: Path | None,
    metrics: tuple[str, int] | None,
    limit_up: float | None,
    limit_down: float | None,
    quota: float | None,
    no_punch: bool,
    lan: bool,
    stage: int,
    threads: int,
    device: DeviceChoice,
) -> None:
    """Compute again, on this computer, what members of the run behind LINK have brought.

    It takes no work of its own. Its word puts members out, so only the run's operator should run it, on a machine that
    is reliable: `barnraise run invite --role auditor` prints the link. A run whose servers compute nothing
    (`[stages] collocated = "never"`) is audited by such machines alone, one at least for each stage. Ctrl-C stops it.

    LINK may also be a file that holds it, or `-` for standard input; without it BARNRAISE_LINK is read, or you are
    asked.
    """
    parsed = parse_link(link, "auditor")
    from node.links.assemble import WayOptions
    from node.process.daemon import NodeOptions, run_node

    sys.exit(
        run_node(
            NodeOptions(
                link=parsed,
                state=state_folder(state, parsed),
                metrics=metrics,
                limits=LineLimits(limit_up, limit_down, quota),
                ways=WayOptions(punch=not no_punch, lan=lan),
                threads=threads,
                device=device,
                stage=stage,
            )
        )
    )


@audit.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--coordinator", help="The node id of the run's coordinator, as it stands in `barnraise status`.")
def verify(file: Path, coordinator: str | None) -> None:
    """Compute again what FILE is evidence of, and say whether the member's results differ as the audit says.

    It lies in the folder `evidence` of a server's or an auditor's state.

    Ends with 0 when they do, with 1 when they do not, with 2 when the file is no evidence or was changed. It needs
    nothing but the file, and its seal beside it; that the member brought these bytes is the word of the server
    or auditor that signed them.
    """
    from node.compute import evidence
    from node.compute.check_evidence import NotCheckedError, recompute
    from node.compute.checkpoint import CheckpointError
    from protocol.trust.identity import node_id

    try:
        found = evidence.read(file)
        rows = recompute(found)
    except (CheckpointError, NotCheckedError) as error:
        raise click.UsageError(f"{file}: {error}") from error
    if found.sealed is None:
        click.echo("nobody has signed this file")
    else:
        of = node_id(found.sealed.coordinator_key)
        if coordinator is not None and of != coordinator:
            raise click.UsageError(f"{file}: signed for another coordinator, {of}")
        click.echo(f"signed by {found.sealed.role} {found.sealed.node} of coordinator {of}")
    tolerance = found.about.config.audit.tolerance
    confirmed = 0
    for recorded, again in rows:
        if recorded.value <= tolerance:
            continue
        same = not again <= tolerance
        confirmed += same
        what = f"{recorded.claim.replace('_', ' ')} of {recorded.task} by {recorded.node}"
        verdict = "confirmed" if same else "NOT confirmed"
        click.echo(f"{what}: off by {recorded.value:.3g} in the audit, {again:.3g} here: {verdict}")
    if not confirmed:
        raise click.ClickException("nothing of it is confirmed: this computer computes what the member brought")
