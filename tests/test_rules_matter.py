"""Each point of the checklists in `protocol/THREATS.md` whose rule lies in trust, drivers or torch: its test can fail.

A row takes one rule away, runs a test that is named for the point there, and expects that it fails; and that it passes
with the rule in its place. Rules that only a whole run shows are taken away in `tests/simulation/mutants.py`. The table
of them all is written by `rules_table.py`.
"""

from __future__ import annotations

import importlib
import math
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rules import Change, Rule, always, fails_without, nothing_done


def _without_end(original: Any) -> float:
    return math.inf


def _a_second(original: Any) -> float:
    return 1.0


def _draws_by_the_name_alone(original: Any) -> Any:
    def is_drawn(self: Any, contribution: Any, step: int, rate: float) -> bool:
        return bool(contribution.number % 100 < 100 * rate)

    return is_drawn


def _any_auditor(original: Any) -> Any:
    return lambda self, node: next(iter(self._queue.values()), None)


def _one_opinion_is_enough(original: Any) -> Any:
    return lambda self, unit, found: original(self, unit, unit.found)


def _whoever_most_are(original: Any) -> Any:
    return lambda self, others: original(self, ())


def _hashes_by_the_place_in_the_vector(original: Any) -> Any:
    return lambda keys, begin, count: original(keys, 0, count)


def _by_the_text_of_a_path(original: Any) -> Any:
    return lambda path, folders: any(Path(path).is_relative_to(folder) for folder in folders)


def _lets_it_be(original: Any) -> Any:
    def reserve(self: Any, account: Any, byte_count: int) -> None:
        self.held_bytes += byte_count
        account.held_bytes += byte_count

    return reserve


def _forgets_a_list(original: Any) -> Any:
    def revoke(self: Any, signed: bytes) -> bool:
        found = original(self, signed)
        self._revoked = frozenset()
        return bool(found)

    return revoke


class _Whatever:
    """It equals everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__


class _AnyVersion(_Whatever, int):
    """A number that every other one equals."""


def _takes_any_point(original: Any) -> Any:
    def keys(public: bytes, secret: bytes, theirs: bytes) -> Any:
        try:
            return original(public, secret, theirs)
        except Exception:
            return bytes(32), bytes(32)

    return keys


def _leaves_out_prologues(original: Any) -> Any:
    return lambda content: b"" if content.startswith(b"webrtc") else original(content)


def _open_to_all(original: Any) -> Any:
    everybody = {pair for pairs in original.values() for pair in pairs}
    return dict.fromkeys(original, everybody | {("stranger", "server"), ("volunteer", "volunteer")})


def _sizes_as_they_are_told(original: Any) -> Any:
    return lambda tensors, most, elements: sum(tensor.byte_count for tensor in tensors)


def _nobody_else_may_read(original: Any) -> Any:
    return lambda number: SimpleNamespace(st_mode=stat.S_IFREG | 0o600)


_HANDSHAKE = "protocol.trust.handshake"
_UNPROVEN: dict[str, Change] = {
    f"{_HANDSHAKE}:verify_signature": always(True),
    f"{_HANDSHAKE}:nacl.bindings.crypto_aead_xchacha20poly1305_ietf_encrypt": lambda original: (
        lambda plain, *_: plain + bytes(16)
    ),
    f"{_HANDSHAKE}:nacl.bindings.crypto_aead_xchacha20poly1305_ietf_decrypt": lambda original: (
        lambda sealed, *_: sealed[:-16]
    ),
}
"""Proofs that are neither sealed nor signed."""

AUDITS, LEANING = "node.server.audits", "node.server.leaning"
RULES = (
    # ---- results of volunteers ----
    Rule(
        "V1", "node.server.test_doubts:test_an_absurd_gradient_waits_for_a_second_opinion",
        {"node.server.doubts:Doubts._why_absurd": always("")}, {"size": 1e3},
    ),
    Rule(
        "V1", "node.server.test_sizes:test_an_absurd_result_waits_for_a_second_opinion",
        {"node.server.sizes:VALUE_FIRST_MAX": _without_end, "node.server.sizes:ABSURD": _without_end}, {"size": 1e37},
    ),
    Rule("V1", "node.server.test_doubts:test_a_claimed_loss_is_bounded",
         {"node.server.doubts:Doubts._why_absurd": always("")}, {"loss": 1e308}),
    Rule("V1", "node.compute.test_compare:test_a_sum_computed_again_is_the_same",
         {"node.compute.worker:relative_difference": always(0.0)}, {"form": "gi"}),
    Rule("V1", "node.compute.test_compare:test_what_is_false_is_far_off_on_the_grid",
         {"tests.node.compute.test_compare:grid_difference": always(0.0)}),
    Rule("V2", "node.server.test_audits:test_a_gross_difference_puts_its_member_out_at_once",
         {f"{AUDITS}:GROSS_TIMES": _without_end}),
    Rule("V2", "node.server.test_audits:test_what_is_within_the_tolerance_passes_and_a_little_more_is_a_strike",
         {f"{AUDITS}:STRIKES_OUT": lambda _: 100}),
    Rule("V2", "node.server.test_audits:test_a_difference_that_is_no_number_is_gross",
         {f"{AUDITS}:GROSS_TIMES": _without_end}, {"value": 1e30}),
    Rule("V2", "node.server.test_leaning:test_a_lean_of_half_the_tolerance_is_found",
         {f"{LEANING}:COHERENT": _without_end}, {"part": 7}),
    Rule("V3", "node.server.test_audits:test_nobody_is_blamed_by_one_opinion",
         {f"{AUDITS}:Audits._second": _one_opinion_is_enough}),
    Rule("V3", "node.server.test_audits:test_strikes_of_long_ago_are_forgotten",
         {f"{AUDITS}:STRIKES_WITHIN": lambda _: 10**6}),
    Rule("V3", "node.server.test_leaning:test_nobody_honest_leans_in_a_hundred_thousand_audits",
         {f"{LEANING}:COHERENT": lambda _: 0.5, f"{LEANING}:FLOOR_SHARE": lambda _: 0.0}),
    Rule("V3", "node.server.test_leaning:test_where_most_lean_it_is_the_auditor",
         {f"{LEANING}:Leaning.judge": _whoever_most_are}),
    Rule("V3", "node.compute.test_compare:"
         "test_what_another_device_rounds_elsewhere_is_a_small_difference_on_the_grid_too",
         {"tests.node.compute.test_compare:grid_difference": lambda _: lambda a, b, units, edges, relative: relative}),
    Rule("V4", "node.server.test_audits:test_a_new_member_is_always_drawn_and_a_known_one_at_the_rate",
         {f"{AUDITS}:Audits.rate_of": always(1.0)}),
    Rule("V5", "node.server.test_audits:"
         "test_the_draw_is_the_same_for_a_ledger_that_restarts_and_another_under_another_key",
         {f"{AUDITS}:Audits._is_drawn": _draws_by_the_name_alone}),
    Rule("V6", "node.server.test_audits:test_nobody_is_blamed_by_one_opinion",
         {f"{AUDITS}:Audits._next_for": _any_auditor}),
    Rule("V6", "node.server.test_audits:test_an_old_opinion_is_no_news",
         {f"{AUDITS}:Audits.report": lambda _: lambda self, auditor, message, now: "taken"}),
    Rule("V7", "node.compute.test_stage_grid:test_a_gradient_is_rounded_alike_however_the_model_is_cut",
         {"node.compute.forms.grid:uniform": _hashes_by_the_place_in_the_vector}, {"cuts": (2,)}),
    Rule("V8", "protocol.trust.test_membership:test_revocation",
         {"protocol.trust.membership:Trust.revoke": _forgets_a_list}),
    Rule("V8", "node.machine.test_revocation:"
         "test_a_list_is_passed_on_once_to_everybody_but_where_it_came_from_and_the_banned",
         {"node.machine.revocation:Revocation._pass_on": nothing_done}),
    Rule("V8", "node.machine.test_revocation:test_a_false_list_ends_the_link_it_came_on",
         {"protocol.trust.membership:verify_signature": always(True)}),
    # ---- transport and identity ----
    Rule("S1", "protocol.trust.test_handshake:test_every_flipped_bit_fails", _UNPROVEN, {"message": 2}),
    Rule("S1", "protocol.trust.test_handshake_signature:test_who_does_not_have_the_key_is_not_believed",
         {f"{_HANDSHAKE}:verify_signature": always(True)}, {"attempt": ".impostor_dials"}),
    Rule("S1", "protocol.trust.test_handshake_signature:test_who_does_not_have_the_key_is_not_believed",
         {f"{_HANDSHAKE}:verify_signature": always(True)}, {"attempt": ".impostor_answers"}),
    Rule("S1", "protocol.trust.test_membership:test_every_bit_of_a_credential_counts",
         {"protocol.trust.membership:verify_signature": always(True)}),
    Rule("S1", "protocol.trust.test_handshake:test_low_order_points",
         {f"{_HANDSHAKE}:nacl.bindings.crypto_kx_server_session_keys": _takes_any_point}),
    Rule("S2", "protocol.link.test_signal:test_every_flipped_bit_is_noticed",
         {"protocol.link.signal:verify_signature": always(True)}),
    Rule("S2", "protocol.link.test_signal:test_the_attackers_own_signature_does_not_help",
         {"protocol.link.signal:verify_signature": always(True)}),
    Rule("S3", "node.links.punch.test_punched_attacks:"
         "test_a_stolen_certificate_key_and_a_recorded_letter_do_not_authenticate",
         {"tests.node.links.punch.test_punched_attacks:prologue": always(b"webrtc")}),
    Rule("S3", "protocol.trust.test_handshake:test_prologues_must_agree",
         {f"{_HANDSHAKE}:_lp": _leaves_out_prologues}),
    Rule("S4", "protocol.trust.test_handshake:test_replays", _UNPROVEN),
    Rule("S4", "protocol.link.test_signal:test_an_answer_to_another_offer_is_refused",
         {"protocol.link.signal:letter_hash": always(_Whatever())}),
    Rule("S4", "protocol.link.test_signal:test_an_offer_counts_once",
         {"protocol.link.signal:SeenOffers.note": nothing_done}),
    Rule("S5", "protocol.trust.test_handshake:test_versions_and_runs", {f"{_HANDSHAKE}:VERSION": _AnyVersion}),
    Rule("S5", "protocol.drive.test_minor:test_a_server_lets_no_other_version_in",
         {"protocol.drive.transport:PROTOCOL_MINOR": _AnyVersion, "tests.protocol.drive.harness:PATIENCE_S": _a_second,
          "tests.protocol.drive.test_minor:PATIENCE_S": _a_second}),
    Rule("S6", "node.links.channel.test_sctp_fence:test_an_attack_ends_the_association_before_it_costs_much",
         {"node.links.channel.sctp_fence:FencedSctp._cut_off": nothing_done}, {"attack": "._streams"}),
    Rule("S7", "protocol.drive.test_half_open:test_one_network_keeps_to_its_share",
         {"protocol.drive.half_open:HalfOpenPlaces.make_room": nothing_done}),
    Rule("S7", "protocol.drive.test_half_open:test_a_cookie_holds_a_place_against_a_flood_without_cookies",
         {"protocol.drive.half_open:Place.prove": nothing_done}),
    Rule("S7", "protocol.link.test_budget:test_whoever_holds_most_gives_way_to_who_holds_less",
         {"protocol.link.budget:Budget.reserve": _lets_it_be}),
    Rule("S7", "protocol.drive.test_back_off:test_a_member_that_broke_a_rule_waits_and_others_do_not",
         {"protocol.link.faults:Faults.of_member": nothing_done}),
    Rule("S7", "protocol.link.test_faults:test_a_network_of_faults_is_heard_no_more_until_it_was_quiet",
         {"protocol.link.faults:Faults.may_call": always(True)}),
    Rule("S8", "protocol.link.test_candidates:test_addresses_inside_are_refused",
         {"protocol.link.candidates:_within": always(False)}, {"host": "10.1.2.3"}),
    Rule("S8", "node.links.test_may_dial:test_where_a_volunteer_connects_to",
         {"node.links.may_dial:is_local": always(False)},
         {"coordinator_at": ["8.8.4.4"], "lan": False, "allowed": ".PUBLIC"}),
    Rule("S9", "protocol.link.test_codec:test_not_finite", {"protocol.link.codec:check_fields": nothing_done},
         {"bad": float("nan")}),
    Rule("S9", "protocol.link.test_framing:test_tensors_are_checked_at_their_header",
         {"protocol.link.incoming:check_tensors": _sizes_as_they_are_told}),
    Rule("S9", "protocol.trust.test_records:test_lengths_are_bounded_before_anything_is_kept",
         {"protocol.trust.records:_CIPHERTEXT_BYTES_MAX": lambda _: 1 << 30}),
    Rule("S11", "node.data.test_allowed:test_every_path_that_a_run_reads_needs_leave",
         {"node.data.allowed:_lies_in": always(True)}),
    Rule("S11", "node.data.test_allowed:test_ways_around_a_folder_lead_nowhere",
         {"node.data.allowed:_lies_in": _by_the_text_of_a_path}),
    Rule("S11", "node.compute.test_seals:test_a_manifest_that_was_made_to_fit_is_found",
         {"protocol.trust.seals:verify_signature": always(True)}),
    Rule("S12", "protocol.drive.test_process:test_planted_secrets_stay_out",
         {"protocol.drive.process:_hide_secrets": lambda original: lambda logger, method, event: event}),
    Rule("S12", "protocol.drive.test_keyfile:test_others_may_not_read_it",
         {"protocol.drive.keyfile:os.fstat": _nobody_else_may_read},
         {"mode": 0o640}),
    Rule("S13", "protocol.link.test_codec:test_role_table", {"protocol.link.codec:MAY_SEND": _open_to_all},
         {"kind": ".Lease"}),
    Rule("S13", "node.server.test_senders:test_places_decide",
         {"node.server.senders:_STANDS": lambda original: dict.fromkeys(original, lambda *_: True)}),
    Rule("S14", "protocol.test_changes:test_golden_files", {f"{_HANDSHAKE}:PROTO": lambda _: b"barnraise/hs/2\0"},
         {"name": "handshake.json"}),
)  # fmt: skip

POINTS = (
    *(f"V{number}" for number in range(1, 9)),
    *(f"S{number}" for number in range(1, 15)),
    *(f"O{number}" for number in range(1, 8)),
)
IN_THE_WORLD = {
    "tickets_are_never_verified": "V1",
    "anybody_contributes_in_anybodys_name": "V1",
    "absurd_contributions_are_taken_at_their_word": "V1",
    "two_members_confirm_each_other": "V1",
    "a_contribution_is_summed_up_twice": "V7",
    "covered_tasks_are_accepted_again": "V7",
    "a_list_of_bans_is_laid_aside": "V8",
    "bounds_are_not_checked": "V1",
}
"""Mutants that a whole run catches, and their points."""
PLANTED = {
    "S9": ("a decoder that lets another error out, and one without an end",
           "fuzz.test_fuzz:test_a_decoder_that_lets_another_error_out_is_found"),
    "S10": ("pickle, `eval`, `torch.load` and their like in a file",
            "test_architecture:test_planted_mistakes_are_found"),
    "O1": ("one changed byte of a wheel",
           "test_supply:test_a_locked_setup_works_without_a_network_and_a_changed_wheel_ends_it"),
    "O4": ("a unit's lines that take rights away", "test_supply:test_a_service_may_do_little"),
    "O6": ("the same; what is found becomes a seed of `tests/fuzz/corpus`",
           "fuzz.test_fuzz:test_a_decoder_that_lets_another_error_out_is_found"),
}  # fmt: skip
"""What must be found is planted in the tests themselves: what, and the test."""
NOT_RUN = {
    "O2": "asks an advisory service; `./deploy/supply` by hand",
    "O3": "needs a package index for its tools; `./deploy/supply` by hand",
    "O5": "needs a container engine",
    "O7": "documents; whether they were exercised before a release is a person's word",
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_test_fails_when_its_rule_is_taken_away(rule: Rule, tmp_path: Path) -> None:
    """And passes with the rule in its place."""
    fails_without(rule, tmp_path)


def test_every_point_has_a_rule_that_is_taken_away_or_says_why_not() -> None:
    shown = {rule.point for rule in RULES} | set(IN_THE_WORLD.values()) | set(PLANTED)
    assert not shown & set(NOT_RUN)
    assert shown | set(NOT_RUN) == set(POINTS)


def test_the_table_of_threats_is_that_of_the_rules() -> None:
    """`python -m tests.rules_table` writes it; every test that it names is there."""
    from tests.rules_table import THREATS, with_table

    text = THREATS.read_text()
    assert with_table(text) == text
    for _, test in PLANTED.values():
        module, _, name = test.partition(":")
        assert hasattr(importlib.import_module(f"tests.{module}"), name), test
