"""The exercise checks: right solutions pass, wrong ones are told what differs, stubs do not stop anything."""

from __future__ import annotations

import pytest
import torch

from moe_lab import checks


def good_top_k(logits, top_k):
    p, indices = logits.softmax(-1).topk(top_k)
    return indices, p / p.sum(-1, keepdim=True)


def good_permute(x, indices, n_experts):
    flat = indices.flatten()
    order = flat.argsort(stable=True)
    return x[order // indices.shape[1]], torch.bincount(flat, minlength=n_experts).cumsum(0)


def good_merge(p, expert_hidden, shared_hidden, rule):
    top_k = p.shape[-1]
    share = top_k * expert_hidden / (top_k * expert_hidden + shared_hidden)
    r, s = {
        "olmo": (top_k, 1),
        "unit_sum": (1, 1),
        "equal_mass": (0.5, 0.5),
        "width_proportional": (share, 1 - share),
    }[rule]
    return r * p, s


def good_balance(scores, indices):
    n_experts = scores.shape[-1]
    f = torch.bincount(indices.flatten(), minlength=n_experts) / indices.numel()
    return n_experts * (f * scores.mean(0)).sum()


GOOD = [
    (checks.check_top_k_route, good_top_k),
    (checks.check_permute_rows, good_permute),
    (checks.check_merge_weights, good_merge),
    (checks.check_balance_loss, good_balance),
]
WRONG = [
    (checks.check_top_k_route, lambda z, k: tuple(z.softmax(-1).topk(k))[::-1], "values of weights differ"),
    (checks.check_top_k_route, lambda z, k: good_top_k(-z, k), "highest scores are those of"),
    (checks.check_top_k_route, lambda z, k: good_top_k(z, 1), "indices has shape (7, 1), but must have (7, 2)"),
    (checks.check_top_k_route, lambda z, k: (z.exp() / z.exp().sum(-1, True)).topk(k)[0], "must return the pair"),
    (checks.check_top_k_route, lambda z, k: good_top_k((z.exp() / z.exp().sum(-1, True)).log(), k), "goes to experts"),
    (checks.check_permute_rows, lambda x, i, n: (x[i.flatten() // n], good_permute(x, i, n)[1]), "must hold token"),
    (
        checks.check_permute_rows,
        lambda x, i, n: (good_permute(x, i, n)[0], torch.bincount(i.flatten(), minlength=n)),
        "of offsets differ",
    ),
    (checks.check_merge_weights, lambda p, f, fs, rule: (p, 1.0), "values of r differ"),
    (checks.check_merge_weights, lambda p, f, fs, rule: (good_merge(p, f, fs, rule)[0], 1.0), "s is 1, but must be 0.5"),
    (checks.check_balance_loss, lambda s, i: i.shape[1] * good_balance(s, i), "K = 2 times too large"),
    (checks.check_balance_loss, lambda s, i: good_balance(s.detach(), i), "carries no gradient"),
    (checks.check_balance_loss, lambda s, i: None, "the loss is None, but must be a tensor"),
    (checks.check_balance_loss, lambda s, i: s[99], "raises IndexError at"),
]  # fmt: skip


def soft_balance(scores, indices):
    """The right value with a gradient through f too: f is made differentiable by a straight-through trick."""
    f = torch.nn.functional.one_hot(indices, scores.shape[-1]).sum(1) / indices.shape[1]
    leaky = (f + scores - scores.detach()).mean(0)
    return scores.shape[-1] * (leaky * scores.mean(0)).sum()


def test_a_gradient_through_the_hard_share_is_noticed(capsys):
    assert checks.check_balance_loss(soft_balance) is False
    assert "of the gradient of the logits differ" in capsys.readouterr().out


@pytest.mark.parametrize(("check", "solution"), GOOD)
def test_right_solutions_agree(check, solution, capsys):
    assert check(solution) is True
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 5
    assert all(line.endswith(": same") for line in lines[:-1])
    total = len(lines) - 1
    assert lines[-1].endswith(f"{total} of {total} configurations agree with the package")


@pytest.mark.parametrize(("check", "solution", "message"), WRONG)
def test_wrong_solutions_are_told_what_differs(check, solution, message, capsys):
    assert check(solution) is False
    out = capsys.readouterr().out
    assert message in out
    # Each result stands behind its configuration.
    assert all("(" in line.split(": ")[0] for line in out.splitlines()[:-1])


@pytest.mark.parametrize("check", [pair[0] for pair in GOOD])
def test_a_stub_is_not_attempted(check, capsys):
    def stub(*arguments):
        raise NotImplementedError

    assert check(stub) is False
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("): exercise not attempted")


def test_pytorchs_not_implemented_is_a_failure_of_the_solution(capsys):
    def solution(scores, indices):
        raise NotImplementedError("could not run 'aten::x'")

    assert checks.check_balance_loss(solution) is False
    assert "raises NotImplementedError" in capsys.readouterr().out


def test_inputs_are_protected_from_solutions(capsys):
    def solution(logits, top_k):
        indices, weights = good_top_k(logits, top_k)
        logits.zero_()
        return indices, weights

    assert checks.check_top_k_route(solution) is True


def test_same_prints_the_difference_and_stops_at_its_tolerance(capsys):
    reference = torch.tensor([1.0, -4.0])
    assert checks.same("output", torch.tensor([1.0, -4.0]), reference) == 0.0
    assert "same  output: 0.0e+00 apart, allowed 1e-06" in capsys.readouterr().out
    with pytest.raises(
        AssertionError, match=r"output: 1 of 2 values of mine differ; the furthest, mine\[0\], is 1.5"
    ):
        checks.same("output", torch.tensor([1.5, -4.0]), reference)
    with pytest.raises(AssertionError, match="is not the reference's"):
        checks.same("output", torch.zeros(3), reference)
    with pytest.raises(AssertionError, match="is nan"):
        checks.same("output", torch.tensor([torch.nan, -4.0]), reference)


def test_difference_is_relative_to_the_largest_reference_value():
    assert checks.difference(torch.tensor([0.0, 3.0]), torch.tensor([0.0, 4.0])) == 0.25
    assert checks.difference(torch.tensor([0.5]), torch.tensor([0.0])) == 0.5
    assert checks.difference(torch.zeros(0), torch.zeros(0)) == 0.0


def test_explain_names_a_scalar_and_a_wrong_type():
    assert checks.explain("the loss", torch.tensor(2.0), torch.tensor(1.0), 1e-6) == (
        "the loss is 2, but must be 1"
    )
    assert checks.explain("s", [1], torch.tensor(1.0), 1e-6) == "s is a list, but must be a tensor"
