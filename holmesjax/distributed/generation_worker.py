"""A process of a plan that generates text: its stage's chunks, which all texts pass through."""

import dataclasses

from jax.sharding import Mesh

from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.config import ModelConfig
from holmesjax.distributed.messages import Continued, TextPiece, Texts, Up
from holmesjax.distributed.worker import Worker
from holmesjax.generation.decoder import ModelPart, restored_params
from holmesjax.generation.sampler import Sampler, cache_length, tokenizer_of
from holmesjax.generation.sampling import Sampling
from holmesjax.generation.stage_decoder import StageDecoder, crossings, lengths
from holmesjax.layer_specs.model_layers import EMBED
from holmesjax.transport.ports import Ports
from holmesjax.transport.tcp import TcpTransport


class Generator(Worker):
    """A process of a job, which generates text."""

    trains = False

    def _run(self) -> int:
        member = self._member
        self._job.check_pool(self._env, [])
        ports = self._listen()
        start = self._meet_controller(ports, None)
        member.status("was starting JAX")
        mesh = self._join(start)
        member.send(Up())
        texts = member.wait_for(Texts)
        found = self._files.saved(start.resume)
        assert found is not None, "the launcher has seen it"
        model = ModelConfig(**found.settings["model"])
        transport = self._transport(found, model, texts, mesh, ports)
        member.status("was reading the weights")
        me, plan = self._me.stage, self._job.plan
        parts = [ModelPart(layers=names, mesh=mesh) for home, names in plan.chunks if home == me]
        params = restored_params(found, model, parts, ema=texts.ema, advance=member.advance)
        decoder = StageDecoder(
            model=model,
            parts=parts,
            params=params,
            plan=plan,
            stage=me,
            transport=transport,
            advance=member.advance,
        )
        sampler = Sampler(decoder=decoder, tokenizer=tokenizer_of(self._job.run_dir, found))
        member.status("was generating")
        self._complete(sampler, texts)
        self._leave(0, transport.close if transport else lambda: None)
        return 0

    def _transport(
        self, found: Checkpoint, model: ModelConfig, texts: Texts, mesh: Mesh, ports: Ports
    ) -> TcpTransport | None:
        """The transport of arrays to other stages; None if there are none."""
        plan = self._job.plan
        if len(plan.stages) == 1:
            return None
        length = cache_length(texts.prompts, texts.max_tokens, model.context_length)
        table = next(key for key in found.manifest["arrays"] if f".{EMBED}." in key)
        cross = crossings(
            plan,
            num_rows=len(texts.prompts),
            lengths=lengths(length, length),
            width=model.width,
            dtype=found.manifest["arrays"][table]["dtype"],
        )
        return self._connect(cross, mesh, ports)

    def _complete(self, sampler: Sampler, texts: Texts) -> None:
        """Continues the texts; the process that knows their tokens first tells the launcher."""
        tells = self._me.leads and self._me.stage == len(self._job.plan.stages) - 1
        show = lambda row, piece: self._send(TextPiece(row=row, text=piece)) if tells else None
        rows, rate = sampler.complete(
            texts.prompts,
            texts.max_tokens,
            Sampling(**texts.sampling),
            stop=texts.stop,
            ends=texts.ends,
            show=show,
        )
        if tells:
            told = [dataclasses.asdict(row) for row in rows]
            self._send(Continued(rows=told, rate=str(rate)))
