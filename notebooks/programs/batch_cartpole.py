"""Observers play CartPole; one agent decides for all of them, by a call for each, or by one batch a step.

Written for torch.distributed.rpc:

    python batch_cartpole.py                           # on torch
    python -m nbdist run batch_cartpole.py             # on nbdist, unchanged

Rewards go to standard output, times to standard error. Where an observer fails, the agent fails the decision that
the others wait for, so that they end, too.
"""

import argparse
import os
import sys
import threading
import time
from functools import partial

import gymnasium
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.rpc import RRef
from torch.distributions import Categorical

AGENT, OBSERVER = "agent", "observer{}"


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 128), nn.Dropout(0.6), nn.ReLU(), nn.Linear(128, 2))

    def forward(self, x):
        return torch.softmax(self.layers(x), dim=-1)


class Observer:
    """Plays, and asks the agent at each step; where an episode ends early, it begins again."""

    def __init__(self, batch, gamma, seed, fails=False):
        self.fails = fails
        self.id = rpc.get_worker_info().id - 1
        self.env = gymnasium.make("CartPole-v1")
        self.seed = seed + self.id
        self.gamma = gamma
        self.select_action = Agent.select_action_batch if batch else Agent.select_action

    def reset(self):
        state, _ = self.env.reset(seed=self.seed)
        self.seed = None
        return state

    def run_episode(self, agent_rref, steps):
        state, episode_reward = self.reset(), steps
        rewards = torch.zeros(steps)
        first = 0
        for step in range(steps):
            if step == 1 and self.fails:
                raise ValueError("asked to fail")
            state = torch.from_numpy(state).float().unsqueeze(0)
            action = rpc.rpc_sync(agent_rref.owner(), self.select_action, args=(agent_rref, self.id, state))
            state, reward, terminated, truncated, _ = self.env.step(action)
            rewards[step] = reward
            if terminated or truncated or step + 1 == steps:
                total = 0.0
                for i in reversed(range(first, step + 1)):
                    total = rewards[i] + self.gamma * total
                    rewards[i] = total
                state = self.reset()
                if first == 0:
                    episode_reward = min(episode_reward, step + 1)
                first = step + 1
        return rewards, episode_reward


class Agent:
    def __init__(self, observers, batch, args):
        self.agent_rref = RRef(self)
        self.policy = Policy()
        self.optimizer = optim.Adam(self.policy.parameters(), lr=1e-2)
        self.batch = batch
        self.running_reward = 0.0
        self.ob_rrefs = [
            rpc.remote(OBSERVER.format(rank), Observer, args=(batch, args.gamma, args.seed, rank == args.fail))
            for rank in range(1, observers + 1)
        ]
        self.lock = threading.Lock()
        self.begin()

    def begin(self):
        count = len(self.ob_rrefs)
        self.states = torch.zeros(count, 4)
        self.log_probs = [] if self.batch else [[] for _ in range(count)]
        self.future_actions = torch.futures.Future()
        self.pending = count
        self.failed = None  # which observer did, and why

    @staticmethod
    def select_action(agent_rref, observer, state):
        """A decision for one observer."""
        self = agent_rref.local_value()
        choice = Categorical(self.policy(state))
        action = choice.sample()
        self.log_probs[observer].append(choice.log_prob(action)[0])
        return action.item()

    @staticmethod
    @rpc.functions.async_execution
    def select_action_batch(agent_rref, observer, state):
        """A decision when all have asked; the last one who asks makes it, and nobody's thread waits."""
        self = agent_rref.local_value()
        with self.lock:
            if self.failed is not None:
                raise RuntimeError(self.failed)
            self.states[observer].copy_(state[0])
            future_action = self.future_actions.then(lambda actions: actions.value()[observer].item())
            self.pending -= 1
            if self.pending == 0:
                self.pending = len(self.ob_rrefs)
                choice = Categorical(self.policy(self.states.clone()))  # which will be written to again
                actions = choice.sample()
                self.log_probs.append(choice.log_prob(actions))
                decided, self.future_actions = self.future_actions, torch.futures.Future()
                decided.set_result(actions)
        return future_action

    def observer_ended(self, observer, done):
        """Fail the decision that the others wait for, if this observer failed: not all will ask."""
        try:
            done.value()
        except Exception as error:
            with self.lock:
                if self.failed is None:
                    self.failed = f"{observer} failed: {error}"
                    self.future_actions.set_exception(RuntimeError(self.failed))

    def run_episode(self, steps):
        """All observers play so many steps; then the policy learns of it."""
        self.begin()
        futures = [rref.rpc_async(timeout=0).run_episode(self.agent_rref, steps) for rref in self.ob_rrefs]
        for rank, future in enumerate(futures, 1):
            future.add_done_callback(partial(self.observer_ended, OBSERVER.format(rank)))
        try:
            returned = torch.futures.wait_all(futures)
        except Exception:
            print_errors(futures)
            raise
        rewards = torch.stack([rewards for rewards, _ in returned]).t()
        reward = sum(reward for _, reward in returned) / len(returned)
        probabilities = torch.stack(
            self.log_probs if self.batch else [torch.stack(one) for one in zip(*self.log_probs, strict=True)]
        )
        (-probabilities * rewards / len(returned)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.running_reward = 0.5 * reward + 0.5 * self.running_reward
        return reward, self.running_reward


def print_errors(futures):
    """Wait for all observers, and say which error ended each of them."""
    for rank, future in enumerate(futures, 1):
        try:
            future.wait()
        except Exception as error:
            print(f"{OBSERVER.format(rank)} ended: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)


def run(rank, observers, batch, port, args):
    torch.manual_seed(args.seed + rank)
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    name = AGENT if rank == 0 else OBSERVER.format(rank)
    rpc.init_rpc(name, rank=rank, world_size=observers + 1)
    if rank == 0:
        agent = Agent(observers, batch, args)
        for episode in range(args.episodes):
            reward, running = agent.run_episode(args.steps)
            print(f"episode {episode}: reward {reward:.2f}, running {running:.2f}", flush=True)
    rpc.shutdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--observers", type=int, nargs="+", default=list(range(1, 11)))
    parser.add_argument("--mode", choices=["batch", "single", "both"], default="both")
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--gamma", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=543)
    parser.add_argument("--fail", type=int, metavar="RANK", help="have this observer fail in its second step")
    parser.add_argument("--port", default="29500")
    args = parser.parse_args()
    for observers in args.observers:
        for batch in {"batch": [True], "single": [False], "both": [True, False]}[args.mode]:
            start = time.perf_counter()
            mp.spawn(run, args=(observers, batch, args.port, args), nprocs=observers + 1)
            seconds = time.perf_counter() - start
            print(f"{observers} observers, {'batch' if batch else 'single'}: {seconds:.2f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
