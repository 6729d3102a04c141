"""`barnraise audit verify`: checks a server's evidence against a member, by computing it once more."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def audit() -> None:
    """What audits by recomputation have found."""


@audit.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--coordinator", help="The node id of the run's coordinator, as it stands in `barnraise status`.")
def verify(file: Path, coordinator: str | None) -> None:
    """Compute again what FILE is evidence of (it lies in the folder `evidence` of a server's state), and say whether
    the member's results differ as the audit says.

    Ends with 0 when they do, with 1 when they do not, with 2 when the file is no evidence or was changed. It needs
    nothing but the file, and its seal beside it; that the member brought these bytes is the word of the server that
    signed them.
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
            raise click.UsageError(f"{file}: signed by a server of another coordinator, {of}")
        click.echo(f"signed by server {found.sealed.node} of coordinator {of}")
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
