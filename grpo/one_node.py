"""GRPO with a 4-bit base on one node: the same model trains and generates, so nothing is copied, sent or served.

python -m grpo.train --config grpo/configs/qlora_one_node.yaml --model_name_or_path BASE --train_files prompts.jsonl --output_dir runs/a
"""

from collections.abc import Callable

from transformers import GenerationConfig

from common import one_node, run
from common.config import DataArguments, ModelArguments, TrainArguments
from common.one_node import Work
from grpo.rollout import Completion, Prompt, Question, RolloutArguments, SyncReport
from grpo.twin import sample_all, samples_of_rank


def build_model(
    model_args: ModelArguments, data_args: DataArguments, rollout_args: RolloutArguments, args: TrainArguments, questions: list[Question]
) -> run.Model:
    """common.one_node.build_model for this run's rows and answers."""
    work = Work(
        row_tokens=data_args.max_length * args.per_device_train_batch_size,
        answers=rollout_args.rollout_batch_size,
        prompt_tokens=max(len(question.prompt_ids) for question in questions),
        completion_tokens=rollout_args.max_completion_length,
    )
    return one_node.build_model(model_args, work)


class OneNodeBackend:
    """`RolloutBackend` that generates with the model that trains."""

    def __init__(self, model: run.Model, *, stop_ids: list[int], pad_id: int, batch_size: int):
        """stop_ids: any of them ends an answer. batch_size: answers generated at a time."""
        self.model, self.stop_ids, self.pad_id, self.batch_size = model.sharded, stop_ids, pad_id, batch_size
        # The checkpoint's own sampling defaults (Qwen3: top_k 20, top_p 0.8) would silently change the distribution.
        self.model.root.model.generation_config = GenerationConfig(eos_token_id=stop_ids, pad_token_id=pad_id)
        self.version = 0

    def start(self) -> None:
        pass

    def sync(self, version: int) -> SyncReport:
        """Nothing to send."""
        self.version = version
        return SyncReport()

    def close(self) -> None:
        pass

    def generate(self, prompts: list[Prompt], num_generations: int, *, seed: int, poll: Callable[[], bool], **sampling) -> list[Completion]:
        wanted = samples_of_rank(prompts, num_generations)
        with self.model.generating() as model:
            return sample_all(
                model, wanted, self.batch_size, self.stop_ids, self.pad_id, version=self.version, seed=seed, poll=poll, **sampling
            )
