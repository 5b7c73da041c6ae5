"""The learner, held against torchrl's discrete soft actor-critic and plain derivations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributions import Categorical

from cotenant.planners.inss.replay import Replay
from cotenant.planners.inss.sac import Batch, Network, Sac, SacOptions, one_thread

# torchrl takes two seconds to import, in every process that collects the tests: one test alone does.
if TYPE_CHECKING:
    from tensordict import TensorDict
    from torchrl.objectives.sac import DiscreteSACLoss

STATES, ACTIONS, ROWS = 5, 4, 32


@pytest.fixture(autouse=True)
def single_threaded() -> Iterator[None]:
    """Two threads that wait for each other on a busy machine take a hundred times as long."""
    with one_thread():
        yield


def learner(heads: tuple[int, ...] = (ACTIONS,), **options: object) -> Sac:
    made = Sac(STATES, heads, SacOptions(hidden=(16, 8), temperature=0.7, **options), seed=1)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in made.targets.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made


def batch(heads: tuple[int, ...] = (ACTIONS,), masks: torch.Tensor | None = None) -> Batch:
    torch.manual_seed(3)
    every = torch.ones(ROWS, sum(heads), dtype=torch.bool) if masks is None else masks
    return Batch(
        torch.randn(ROWS, STATES),
        torch.stack([torch.randint(0, head, (ROWS,)) for head in heads], dim=1),
        torch.randn(ROWS),
        torch.randn(ROWS, STATES),
        every,
        every,
        (torch.arange(ROWS) % 4 == 0).float(),
    )


def as_module(network: Network, index: int) -> nn.Sequential:
    """Return one of our networks as torch's own layers."""
    parts: list[nn.Module] = []
    for weights, bias in zip(network.weights, network.biases, strict=True):
        linear = nn.Linear(*weights.shape[1:])
        linear.weight.data, linear.bias.data = weights[index].detach().T.clone(), bias[index, 0].detach().clone()
        parts += [linear, nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def reference(made: Sac) -> DiscreteSACLoss:
    """Return torchrl's loss with the same networks."""
    from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
    from torchrl.objectives.sac import DiscreteSACLoss

    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(as_module(made.actor, 0), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["action"], distribution_class=Categorical),
    )
    critics = [as_module(made.critics, n) for n in range(2)]
    targets = [as_module(made.targets, n) for n in range(2)]
    loss = DiscreteSACLoss(
        actor,
        TensorDictModule(critics[0], in_keys=["observation"], out_keys=["action_value"]),
        action_space="categorical",
        num_actions=ACTIONS,
        loss_function="l2",
        alpha_init=made.temperature,
        target_entropy=made.target_entropy,
    )
    loss.make_value_estimator(gamma=made.options.discount)
    for params, networks in ((loss.qvalue_network_params, critics), (loss.target_qvalue_network_params, targets)):
        for key in params.keys(include_nested=True, leaves_only=True):
            same = [dict(network.named_parameters())[".".join(key[1:])] for network in networks]
            params.get(key).data.copy_(torch.stack([each.data for each in same]))
    return loss


def as_tensordict(data: Batch) -> TensorDict:
    from tensordict import TensorDict

    done = data.done.bool()[:, None]
    return TensorDict(
        {
            "observation": data.states,
            "action": data.actions[:, 0],
            "next": {
                "observation": data.next_states,
                "reward": data.rewards[:, None],
                "done": done,
                "terminated": done,
            },
        },
        batch_size=[ROWS],
    )


@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")
def test_losses_and_gradients_agree_with_torchrl() -> None:
    """torchrl leaves the half of equation 6 out, and minimises log τ · (entropy - Ĥ) rather than τ · (entropy - Ĥ)."""
    made, data = learner(), batch()
    theirs = reference(made)
    expected = theirs(as_tensordict(data))
    critic_loss = made.critic_loss(data)
    actor_loss, entropies = made.actor_loss(data)
    temperature_loss = made.temperature_loss(entropies)
    assert 2 * critic_loss.item() == pytest.approx(expected["loss_qvalue"].item(), rel=1e-5)
    assert actor_loss.item() == pytest.approx(expected["loss_actor"].item(), rel=1e-5)
    critic_loss.backward()
    actor_loss.backward()
    temperature_loss.backward()
    expected["loss_qvalue"].backward()
    expected["loss_actor"].backward()
    expected["loss_alpha"].backward()
    for n in range(3):
        mine = made.critics.weights[n].grad
        assert mine is not None
        want = theirs.qvalue_network_params.get(("module", str(2 * n), "weight")).grad
        torch.testing.assert_close(2 * mine, want.transpose(1, 2), rtol=1e-4, atol=1e-6)
        actor = made.actor.weights[n].grad
        assert actor is not None
        want = theirs.actor_network_params.get(("module", "0", "module", str(2 * n), "weight")).grad
        torch.testing.assert_close(actor[0], want.T, rtol=1e-4, atol=1e-6)
    assert made.log_temperature.grad is not None
    assert made.log_temperature.grad.item() == pytest.approx(made.temperature * theirs.log_alpha.grad.item(), rel=1e-5)


def test_heads_are_as_many_learners_whose_losses_add_up() -> None:
    """Numpy's derivation of equations 6 to 8 for two heads of three and two choices, one choice of which is masked."""
    heads = (3, 2)
    masks = torch.ones(ROWS, 5, dtype=torch.bool)
    masks[::2, 1] = False
    made, data = learner(heads), batch(heads, masks)
    data.actions[::2, 0] = 2
    tau, gamma = made.temperature, made.options.discount

    def rows(network: Network, states: torch.Tensor) -> NDArray[np.float64]:
        return np.asarray(network(states).detach().double().numpy())

    critic = actor = 0.0
    for n, part in enumerate((slice(0, 3), slice(3, 5))):
        possible = masks[:, part].numpy()
        for states, following in ((data.next_states, True), (data.states, False)):
            logits = np.where(possible, rows(made.actor, states)[0][:, part], -np.inf)
            probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
            probabilities /= probabilities.sum(axis=1, keepdims=True)
            logs = np.log(np.where(possible, probabilities, 1.0))
            values = rows(made.targets if following else made.critics, states)[:, :, part].min(axis=0)
            if following:
                future = (probabilities * (values - tau * logs)).sum(axis=1)
                goal = data.rewards.numpy() + gamma * (1 - data.done.numpy()) * future
            else:
                actor += (probabilities * (tau * logs - values)).sum(axis=1).mean()
        chosen = rows(made.critics, data.states)[:, np.arange(ROWS), data.actions[:, n].numpy() + part.start]
        critic += 0.5 * ((chosen - goal) ** 2).mean(axis=1).sum()
    assert made.critic_loss(data).item() == pytest.approx(critic, rel=1e-5)
    assert made.actor_loss(data)[0].item() == pytest.approx(actor, rel=1e-5)


def test_decoupled_targets_have_no_entropy() -> None:
    made, data = learner(decoupled=True), batch()
    with torch.no_grad():
        made.log_temperature += 3.0
        hot = made.critic_loss(data).item()
        made.log_temperature -= 6.0
        assert made.critic_loss(data).item() == hot
    coupled = learner()
    before = coupled.critic_loss(data).item()
    with torch.no_grad():
        coupled.log_temperature += 3.0
    assert coupled.critic_loss(data).item() != pytest.approx(before)


def test_update_moves_targets_slowly_and_lowers_the_critics_loss() -> None:
    made, data = learner(learning_rate=1e-2), batch()
    before = [parameter.clone() for parameter in made.targets.parameters()]
    losses = [made.update(data) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]
    fresh = learner(learning_rate=1e-2)
    fresh.update(data)
    for old, target, critic in zip(before, fresh.targets.parameters(), fresh.critics.parameters(), strict=True):
        torch.testing.assert_close(target, old + 0.01 * (critic.detach() - old))


def test_temperature_falls_while_the_entropy_is_above_its_target() -> None:
    made, data = learner(learning_rate=1e-2), batch()
    assert made.target_entropy == pytest.approx(-np.log(1 + ACTIONS))
    before = made.temperature
    made.update(data)
    assert made.temperature < before
    rising = learner(learning_rate=1e-2, target_entropy=2.0)
    rising.update(data)
    assert rising.temperature > before


def test_act_draws_by_probability_and_never_what_is_masked() -> None:
    made = learner((3, 2))
    mask = np.array([True, False, True, True, True])
    state, rng = np.ones(STATES), np.random.default_rng(0)
    drawn = np.array([made.act(state, mask, rng) for _ in range(4000)])
    probabilities = made.distribution(torch.ones(1, STATES), torch.tensor(mask[None]))[0][0].detach().numpy()
    assert np.bincount(drawn[:, 0], minlength=3) / 4000 == pytest.approx(probabilities[0], abs=0.03)
    assert np.bincount(drawn[:, 1], minlength=2) / 4000 == pytest.approx(probabilities[1, :2], abs=0.03)
    assert not (drawn[:, 0] == 1).any()


def test_learner_finds_the_best_choices_of_a_bandit() -> None:
    """Two independent choices are rewarded: the index of the state's larger entry, and its opposite."""
    options = SacOptions(hidden=(32, 32), learning_rate=5e-3, discount=0.0, temperature=0.5)
    made = Sac(2, (2, 2), options, seed=0)
    rng = np.random.default_rng(0)
    replay = Replay(2000, 2, 2, 4)
    every = np.ones(4, dtype=bool)
    for _ in range(600):
        state = rng.uniform(-1, 1, 2)
        action = made.act(state, every, rng)
        larger = int(state[1] > state[0])
        reward = float(action[0] == larger) + float(action[1] != larger)
        replay.add(state, action, reward, state, every, every)
        if len(replay) >= 64:
            made.update(replay.sample(64, rng))
    states = torch.tensor(rng.uniform(-1, 1, (200, 2)), dtype=torch.float32)
    chosen = made.distribution(states, torch.ones(200, 4, dtype=torch.bool))[0].argmax(dim=-1)
    best = (states[:, 1] > states[:, 0]).long()
    assert (chosen[:, 0] == best).float().mean() > 0.95
    assert (chosen[:, 1] != best).float().mean() > 0.95


def test_replay_holds_the_newest() -> None:
    replay = Replay(3, 1, 1, 2)
    mask = np.ones(2, dtype=bool)
    for n in range(5):
        replay.add(np.array([float(n)]), np.array([n % 2]), float(n), np.array([n + 1.0]), mask, mask)
    drawn = replay.sample(200, np.random.default_rng(0))
    assert len(replay) == 3
    assert set(drawn.rewards.tolist()) == {2.0, 3.0, 4.0}
    assert (drawn.next_states[:, 0] == drawn.states[:, 0] + 1).all()
    assert (drawn.actions[:, 0] == drawn.rewards % 2).all()
