"""`Swarm`: a served model, which makes models that use its blocks. `nbdist.swarm.serving` makes one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from nbdist.amounts import counted, size
from nbdist.errors import NbdistError, UsageError
from nbdist.rpc import api
from nbdist.swarm import adapter
from nbdist.swarm.client.crew import Crew, Gone
from nbdist.swarm.client.journal import Journal
from nbdist.swarm.client.model import remote_model
from nbdist.swarm.client.sequential import RemoteSequential
from nbdist.swarm.client.session import Session
from nbdist.swarm.client.sessions import Sessions
from nbdist.swarm.directory.placing import FarPlacer
from nbdist.swarm.directory.routing import Span, named
from nbdist.swarm.doors.doorkeeper import Doorkeeper
from nbdist.swarm.placer import Placer
from nbdist.swarm.policy import Recover, check_count
from nbdist.swarm.server.neighbours import Address
from nbdist.swarm.server.server import Info
from nbdist.swarm.server.sources import FarWeights, offer

if TYPE_CHECKING:
    from nbdist.swarm.http.endpoint import Endpoint


class Swarm:
    """A model whose blocks run on workers. `serve` makes one; after `close`, what needs workers raises UsageError.

    After the end of RPC, that raises `NotInitialized`; `blocks`, `states`, `log`, `check`, `snapshot` and `ended` still
    answer in both cases. Other workers load the blocks of a dead one at once, if they have room. `causal_lm`, `model`,
    `sequence_classifier` and `sequential` make models that use the blocks; `join`, `leave`, `move` and `kill` change
    which workers serve. Methods may be called from any thread. As the value of a notebook cell, a swarm is drawn as a
    map.

    Example:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=97
        ... )
        >>> sw = nbdist.swarm.serve(transformers.LlamaForCausalLM(config), workers=["worker0"])
        >>> sw.join("worker1", 2, 4)
        >>> sw.blocks
        {'worker0': [0, 1, 2, 3], 'worker1': [2, 3]}
        >>> sw.leave("worker0")  # worker1 loads blocks 0 and 1, which it alone has then
        >>> sw.states
        {'worker0': 'offline', 'worker1': 'online'}
        >>> sw.blocks
        {'worker1': [0, 1, 2, 3]}
        >>> sw.close()
    """

    def __init__(self, checkpoint: adapter.Checkpoint, crew: Crew, journal: Journal) -> None:
        self.checkpoint = checkpoint
        self.sizes = crew.sizes
        """Bytes of each block."""
        self.journal = journal
        self.crew = crew
        self.sessions = Sessions(self.crew, self.journal)
        self._doors: list[Doorkeeper] = []
        # The description of each worker, from just before the swarm was closed; None while it is open.
        self._closed: list[dict[str, Any]] | None = None

    # -- looking ------------------------------------------------------------------------------

    @property
    def _placer(self) -> Placer | FarPlacer:
        assert isinstance(self.crew.placing, Placer | FarPlacer)
        return self.crew.placing

    @property
    def blocks(self) -> dict[str, list[int]]:
        """The numbers of the blocks that each worker serves, by name of the worker; {} once the swarm was closed.

        Asks no worker, so a death that nobody has noticed yet does not show. Workers that are gone are left out.
        """
        return {member.name: list(member.blocks) for member in self.crew.there}

    @property
    def states(self) -> dict[str, str]:
        """The state of each worker that has ever served, by name.

        A state is "joining" (it loads its first blocks), "online", "banned" (it did not answer or could not load
        blocks, and is not called for a while), "draining" (it is about to leave), "offline" (it has left, or the swarm
        was closed), or "gone" (it died, or could not load its first blocks). Asks no worker. After the end of RPC, the
        last states stay.
        """
        return {each["name"]: each["state"] for each in self._describe_members()}

    @property
    def log(self) -> list[str]:
        """The last 200 events, oldest first, a line each: workers load blocks, die or leave; sessions recover."""
        return self.journal.lines

    def info(self) -> dict[str, Info]:
        """Ask each server for its state; return the answers by worker, without the servers that do not answer.

        Changes the swarm in two cases only: a lost server is marked as gone, and a server that does not answer may be
        banned for a while. Returns {} if no server is left, or the swarm is closed. Raises NotInitialized after the end
        of RPC.
        """
        with self.crew.working():
            found = {}
            # All are called before the first answer is awaited: servers that hang cost one time limit, not one each.
            for member, asked in [(member, self.crew.send(member, "info")) for member in self.crew.there]:
                with contextlib.suppress(Gone):
                    found[member.name] = self.crew.answer(member, asked)
            return found

    def route(self, begin: int = 0, end: int | None = None) -> list[Span]:
        """Return the route that a session through the blocks from ``begin`` to before ``end`` would take now.

        Blocks that no worker has are loaded on a worker first.

        Raises:
            NoRoute: no worker has one of the blocks, and none can load it, for ``route_timeout`` seconds of `serve`.
            UsageError: there are no such blocks, or the swarm is closed.
            NotInitialized: RPC has ended in this process.
        """
        self.crew.check_open()
        end = self.check(begin, end)
        with self.crew.working():
            return [span for span, _ in self.crew.way(begin, end)]

    def check(self, begin: int, end: int | None, hint: str = "") -> int:
        """Return ``end``, or the number of blocks if it is None; raise UsageError if the range is not valid or empty.

        ``begin`` is the first block of the range, ``hint`` the end of the error's text.
        """
        end = len(self) if end is None else end
        if not (isinstance(begin, SupportsIndex) and isinstance(end, SupportsIndex) and 0 <= begin < end <= len(self)):
            raise UsageError(
                f"there are no blocks from {begin} to {end}: there are {len(self)}, numbered from 0, and the first "
                f"number must be less than the second{hint}"
            )
        return end

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> Any:
        return self.sessions.__reduce__()

    def __repr__(self) -> str:
        over = "; it is over" if self.ended else ""
        lines = [f"<Swarm of {counted(len(self), 'block')}, {size(sum(self.sizes))}{over}>"]
        for each in self._describe_members():
            blocks = [number for begin, end in each["blocks"] for number in range(begin, end)]
            lines.append(
                f"  {each['name']}: {named(blocks)}{'' if each['state'] == 'online' else ', ' + each['state']}"
            )
        return "\n".join(lines)

    def _describe_members(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [member.told(now, self.sizes, self.crew.options.cache_bytes) for member in self.crew.members]

    @property
    def ended(self) -> bool:
        """True once the swarm was closed, or RPC has ended in this process. The swarm does not serve any more.

        It stays False when all workers are gone: another one may `join`.
        """
        return self.crew.ended

    def snapshot(self) -> dict[str, Any]:
        """Return the data that a map of the swarm shows, without calling any server.

        For a closed swarm, the servers are described as they were just before it was closed.

        Returns:
            A dict of JSON values: ``count`` of blocks, their ``bytes``, ``servers`` and ``clients`` (a dict each), and
            the ``route``, ``session`` and ``log`` of `Journal.told`. The clients are those that have something of the
            swarm, this process first; others as they were a second ago.
        """
        servers = self._describe_members() if self._closed is None else self._closed
        others = [usage for client, usage in self.crew.usage.items() if client != self.crew.incarnation]
        clients = [] if self.ended else [each for each in (self.sessions.usage(), *others) if each]
        sizes = {"count": len(self), "bytes": sum(self.sizes)}
        return {**sizes, "servers": servers, "clients": clients, **self.journal.told()}

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback()`` whenever the swarm changes; return a function that removes the callback.

        Any thread may call it, so the callback must be quick. If it raises, the error is logged, each time. Also works
        on a closed swarm. To call the returned function twice is harmless.
        """
        return self.journal.listen(callback)

    # -- workers that come and go -------------------------------------------------------------

    def join(self, worker: int | str, begin: int | None = None, end: int | None = None) -> None:
        """Let ``worker`` serve the blocks from ``begin`` to before ``end``, in addition to its own.

        By default these are the blocks that it served before it died or left, or all if it is new or serves now.
        Returns when the blocks are loaded. Other workers keep serving the same blocks. A worker that was restarted has
        to join again. See notebooks/09_swarm.ipynb.

        Raises:
            UsageError: there are no such blocks, or the swarm is closed.
            UnknownWorker: there is no such worker.
            WorkerLost: the worker is dead, or died while it loaded the blocks.
            NbdistError: the worker does not answer. Any other error of loading is raised unchanged.
            NotInitialized: RPC has ended in this process.
        """
        self.crew.check_open()
        if begin is not None or end is not None:
            end = self.check(begin or 0, end)
        with self.crew.working():
            self._placer.join(self.crew.name_of(worker), begin, end)

    def leave(self, worker: int | str) -> None:
        """Take ``worker`` out of the swarm without losing anything.

        Other workers load the blocks that only this worker has, and sessions move there with their caches (those of
        other processes, see `connect`, do their steps again there). Then the
        worker drops its blocks. This waits for running steps of sessions. After an interrupt, call it again. See
        notebooks/09_swarm.ipynb.

        Raises:
            UsageError: the worker does not serve, as after a first call, or if it is dead; or the swarm is closed.
            NoRoute: no other worker can take its blocks. The worker continues to serve.
            NotInitialized: RPC has ended in this process.
        """
        self.crew.check_open()
        member = self.crew.member(worker)
        with self.crew.working():
            server = self._placer.relieve(member.name)
            # Sessions can move only now: other workers have the blocks.
            for session in self.sessions.open():
                session.settle()
                self.crew.abandon(session.id, [member])
            self._placer.dismiss(server)

    def move(self, begin: int, end: int, worker: int | str) -> None:
        """Move the blocks from ``begin`` to before ``end`` to ``worker``, which serves already; all others drop them.

        Sessions move along with their caches; a session that this call has not moved, after an interrupt, moves in its
        next step. The worker keeps the blocks that it had. See notebooks/09_swarm.ipynb.

        Raises:
            UsageError: there are no such blocks, the worker does not serve and has to `join` first, or the swarm is
                closed.
            NotInitialized: RPC has ended in this process.
            NbdistError: the worker died or did not answer. After this or any other error of loading, no block has
                moved.
        """
        self.crew.check_open()
        end = self.check(begin, end, ". `move` takes the blocks first, and then the worker")
        member = self.crew.member(worker)
        with self.crew.working():
            relieved = self._placer.shift(begin, end, member.name)
            try:
                for session in self.sessions.open():
                    session.settle()
            finally:  # also after an interrupt: what is left keeps its caches, and moves in its next step
                self._placer.unload(relieved)

    def kill(self, worker: int | str) -> None:
        """Kill the process of ``worker`` with SIGKILL, to see how the swarm recovers. See notebooks/09_swarm.ipynb.

        Returns at once; the next call to the worker, or this process's agent, notices the death.

        Raises:
            UsageError: the worker does not serve, is gone already, or is this very process; or the swarm is closed.
            NotInitialized: RPC has ended in this process.
        """
        self.crew.check_open()
        with self.crew.working():
            self._placer.kill(self.crew.member(worker).name)

    def invite(self, file: str | Path, host: str = "127.0.0.1", port: int = 0) -> Path:
        """Open a door for clients on other hosts, and write the invitation with which they `connect`; return its path.

        Each client that has the file can write texts, until this process closes the swarm or revokes the invitation.
        It is no member: it runs no code here, does not change which workers serve, and does not see the sessions of
        others. SECURITY.md says what clients can do. A second call opens another door, with a secret of its own.

        Args:
            file: a file that only this user may read is made there, or replaced. Bring it to the other host by a way
                that nobody else reads, such as scp.
            host: this host's address for the clients.
            port: 0 for a free one.

        Raises:
            UsageError: the file cannot be written, the swarm is closed, or this process is itself such a client.
            ChannelError: the address is not this host's, or the port is taken.
        """
        self.crew.check_open()
        if not self.crew.is_member:
            raise UsageError("this process is a client by an invitation, and cannot invite others: copy its file")
        far = isinstance(self.checkpoint.weights, FarWeights)  # else this process reads the file for the clients
        source = self._placer.facts().source if far else offer(self.checkpoint)
        weights = Address(source.client, source.name)
        door = Doorkeeper(self.crew, self.journal, self.checkpoint.config, weights, host, port)
        self._doors.append(door)
        door.invitation.write(Path(file))
        return Path(file)

    def revoke_invitations(self) -> int:
        """Make all invitations of `invite` invalid, and end their clients' texts; return how many were valid.

        Clients get a WorkerLost that says so. Invitations that another process has made stay valid.
        """
        return self._close_doors("the invitation was revoked")

    def _close_doors(self, why: str) -> int:
        doors, self._doors = self._doors, []
        for door in doors:
            door.close(why)
        return len(doors)

    def address(self) -> str:
        """Return the address with which other processes of this host use the swarm, too: see `connect`.

        It names the process that decides who serves, and is another one once that process was lost. Asks nobody.
        Raises UsageError in a client on another host.
        """
        if not self.crew.is_member:
            raise UsageError("this process is a client by an invitation: others connect by a copy of its file")
        return f"{api.current_agent().options.init_method}#{self._placer.address.worker}#{self._placer.address.name}"

    def close(self) -> None:
        """Stop serving: the workers drop blocks and caches, and the file of weights that `serve` wrote is removed.

        Models made from the swarm then raise UsageError. A second call changes nothing. Raises nothing if a worker is
        dead or RPC has ended. A swarm that `connect` has returned ends for its own process only; so does one that
        `serve` has returned, once a worker has become the placer (see `connect`). Then it ends for all with the last
        process that uses it.
        """
        # Before the workers are offline: a map shows them as they were.
        if not self.ended:
            self._closed = self._describe_members()
        self.crew.closed = True  # first: what fails from now on in other threads says that the swarm is closed
        self._close_doors("the swarm was closed")
        with contextlib.suppress(NbdistError):  # RPC may have ended
            self.crew.note_usage(self.crew.incarnation, {})
        self._placer.close()
        self.sessions.close()
        self.journal.news()

    # -- sessions -----------------------------------------------------------------------------

    def session(
        self, cache: Any, begin: int = 0, end: int | None = None, *, expected: int = 0, recover: Recover | None = None
    ) -> Session:
        """Start a session that lasts as long as ``cache``, an empty DynamicCache of transformers, and return it.

        Models start sessions by themselves, for each new cache. The first step calls the servers. From now on, the
        cache itself only counts tokens. Its operations (`crop`, `reorder_cache`) are recorded, and the servers repeat
        them.

        Args:
            cache: decides when the session ends: when it is garbage-collected. Its attribute ``nbdist`` becomes
                (the `RecordedCache`, the session).
            begin: the first block that the session goes through.
            end: the block before which the session ends; by default all blocks.
            expected: the number of tokens that the session will have at its end, so that servers can reserve memory. 0
                if unknown.
            recover: as for `serve`; by default as the swarm's.

        Raises:
            UsageError: ``cache`` is of another class or has a session, there are no such blocks, ``recover`` is not
                valid, or the swarm is closed. Errors of servers come with the first step, not here.
        """
        self.crew.check_open()
        self.check(begin, end)
        return self.sessions.begin(cache, begin, end, expected=expected, recover=recover)

    # -- models -------------------------------------------------------------------------------

    def tokenizer(self) -> Any:
        """Load and return the model's tokenizer; raise transformers' error if the model came without one.

        Raises UsageError if the swarm is closed and has removed its folder. Asks no worker.
        """
        if not self.checkpoint.folder.exists():  # a folder of the user's outlives the swarm
            self.crew.check_open()
        return self.checkpoint.tokenizer()

    def causal_lm(self, *, recover: Recover | None = None) -> Any:
        """Make a transformers model for causal language modelling whose blocks run on the workers.

        The embeddings and the head are in this process. The model takes what any such model takes: ``generate()``, a
        DynamicCache, ``labels``. All its weights are frozen. Gradients pass through the blocks if no cache is used
        (``use_cache=False``), for example to ``inputs_embeds``. Calls raise `NoRoute` if no worker can serve a block,
        and `CacheFull` if the servers' memory for caches does not suffice. The hidden states and attentions of single
        blocks stay on the workers: ``output_hidden_states=True`` and ``output_attentions=True`` raise UsageError. Use
        `sequential` to get the hidden states behind any block.

        Args:
            recover: "exact" or "fast", as for `serve`; by default as the swarm's.

        Raises:
            UsageError: the swarm is closed, ``recover`` is not valid, or the model came without a head.
            NoRoute: no worker can serve the first block, which is called once.
            NotInitialized: RPC has ended in this process.

        Example:
            >>> import transformers
            >>> config = transformers.LlamaConfig(
            ...     hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=97
            ... )
            >>> model = transformers.LlamaForCausalLM(config).eval()
            >>> sw = nbdist.swarm.serve(model, workers=["worker0", "worker1"])
            >>> remote = sw.causal_lm()
            >>> ids = torch.tensor([[5, 6, 7]])
            >>> torch.equal(remote(ids).logits, model(ids).logits)
            True
            >>> embedded = remote.get_input_embeddings()(ids).requires_grad_()
            >>> remote(inputs_embeds=embedded, labels=ids, use_cache=False).loss.backward()
            >>> embedded.grad.shape
            torch.Size([1, 3, 32])
            >>> sw.close()
        """
        return self._model("CausalLM", recover)

    def model(self, *, recover: Recover | None = None) -> Any:
        """Make a transformers model without a head; it returns hidden states. Arguments are those of `causal_lm`.

        So are its errors: UsageError if the swarm is closed or ``recover`` is not valid, NoRoute without a worker.
        """
        return self._model("Model", recover)

    def sequence_classifier(self, num_labels: int | None = None, *, recover: Recover | None = None) -> Any:
        """Make a transformers model that classifies sequences. The other arguments are those of `causal_lm`.

        If the model came without such a head, it gets a new head with random weights, which you must train.
        ``num_labels`` is the number of classes; by default the number in the model's configuration. Raises UsageError
        if it is less than 1, and otherwise the errors of `causal_lm`.
        """
        check_count("num_labels", num_labels)
        return self._model("SequenceClassification", recover, num_labels)

    def sequential(self) -> RemoteSequential:
        """Return all blocks as one module, from hidden states to hidden states. Slices of it are some of the blocks.

        `nbdist.swarm.client.sequential.RemoteSequential` has an example. Raises UsageError if the swarm is closed,
        NoRoute if no worker can serve the first block, and NotInitialized if RPC has ended.
        """
        return RemoteSequential(self._model("Model", None).nbdist, 0, len(self))

    def http(
        self,
        port: int = 0,
        host: str = "127.0.0.1",
        *,
        name: str | None = None,
        tokenizer: Any = None,
        key: bool = True,
        hosts: Iterable[str] = (),
        at_once: int | None = 4,
        queue: int | None = 64,
        rate: int | None = 600,
    ) -> Endpoint:
        """Serve the model over HTTP, for clients of OpenAI's API; return the running `Endpoint`, which shows its key.

        Needs the extra "serve". Its text with temperature 0 is that of ``causal_lm().generate(do_sample=False)``. The
        page docs/howto/serve_over_http.md says what clients can ask for.

        Args:
            port: 0 for a free one.
            host: the address at which it listens. Key and texts are not encrypted, so prefer an ssh tunnel to others.
            name: of the model, for clients; by default its folder's, or, with ``tokenizer``, its architecture's.
            tokenizer: by default that of the model's folder.
            key: False to ask for no key, on a loopback address only. Other users of the host reach that, too.
            hosts: further names by which clients reach it, such as a proxy's; those of this host are known.
            at_once: texts that are written at once; None for no limit, here and below.
            queue: texts that may wait. A request for more gets the error 429.
            rate: requests a minute. A request more gets the error 429.

        Raises:
            ImportError: starlette or uvicorn is missing.
            UsageError: an argument is not valid, or there is no tokenizer; or as for `causal_lm`, whose other errors
                are raised, too.
            OSError: the port is taken, or this host does not have the address.
        """
        from nbdist.swarm.http.endpoint import Endpoint
        from nbdist.swarm.http.limits import Limits

        name = name or (self.checkpoint.config.model_type if tokenizer else self.checkpoint.folder.name)
        limits = Limits(at_once, queue, rate)
        try:
            tokenizer = tokenizer or self.tokenizer()
        except (OSError, ValueError) as error:
            raise UsageError(
                "the model came without a tokenizer: pass one, http(tokenizer=AutoTokenizer.from_pretrained(...))"
            ) from error
        model = self.causal_lm()
        endpoint = Endpoint(
            model, tokenizer, name, lambda: self.states, limits, host=host, port=port, key=key, hosts=hosts
        )
        self.sessions.endpoints.add(endpoint)
        return endpoint

    def _model(self, kind: str, recover: Recover | None, num_labels: int | None = None) -> Any:
        self.crew.check_open()
        way = self.sessions.way_to_recover(recover)
        return remote_model(self.sessions, self.checkpoint, kind, recover=way, num_labels=num_labels)
