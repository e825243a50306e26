"""The policy that comes with the project: it loads with every version, and it flies."""

from pathlib import Path

from slipstream import evaluate, load_policy, policy_candidate, standard_scenarios

STRONG = Path(__file__).parents[2] / "examples/policies/strong.slip"


def test_the_strong_policy_flies_through_unseen_maps():
    loaded = load_policy(STRONG)
    assert loaded.trained is not None
    assert loaded.trained.max_frame_num == loaded.settings.max_frame_num == 1e7
    through = standard_scenarios(loaded.settings, num_maps=8)[0]
    result = evaluate(policy_candidate(loaded.policy), loaded.settings, through, episodes=64)
    # In 512 flights it is 0.93. Another CPU rounds differently, and flights of 8 maps scatter.
    assert result.rates["success"].mean > 0.7
