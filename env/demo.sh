#!/usr/bin/env bash
#
# The whole path in a few minutes on two CPU cores: environment, a tiny random Qwen3-MoE, supervised fine-tuning on two ranks, a stop
# half way and a resume, export to Hugging Face format, preference optimisation (DPO) of the exported model, an answer before and after each
# through plain transformers, and reinforcement learning from rewards (GRPO) with the reward on held-out questions before and after.
#
#   bash env/demo.sh [DIR]        (default: runs/demo; what an earlier demo left there is replaced)
#
# ENV_DIR, PYTHON, TORCH_INDEX_URL: see env/setup.sh. Nothing but packages is downloaded. Exit status: 0 when every step worked and the
# trained model answers; that of the failed step otherwise; 2 wrong use.

set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
-h | --help)
    sed -n '3,/^$/p' env/demo.sh | sed 's/^# \{0,1\}//'
    exit 0
    ;;
-*)
    echo "env/demo.sh: unknown option $1 (see --help)" >&2
    exit 2
    ;;
esac
demo=${1:-runs/demo}
if [ $# -gt 1 ]; then
    echo "env/demo.sh: give one folder, not $*" >&2
    exit 2
fi
if [ -e "$demo" ] && [ ! -e "$demo/.demo" ]; then
    echo "env/demo.sh: $demo exists and no demo made it: name another folder" >&2
    exit 2
fi

step() { printf '\n== %s\n' "$*"; }

step "1/8  environment"
bash env/setup.sh train
bin=${ENV_DIR:-$PWD/.venv}/train/bin
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error HF_HUB_DISABLE_PROGRESS_BARS=1
start=$SECONDS

rm -rf "$demo"
mkdir -p "$demo"
touch "$demo/.demo"

step "2/8  a tiny model of the Qwen3-MoE family, and 24 conversations about capitals"
"$bin/python" -m common.tiny --family qwen3_moe --output "$demo/model"
head -n 2 env/demo.jsonl

# train STEPS: the same command both times; the second finds the checkpoint of the first and goes on from there.
train() {
    "$bin/torchrun" --standalone --nproc-per-node 2 -m sft.train --config sft/configs/tiny.yaml \
        --model_name_or_path "$demo/model" --train_files env/demo.jsonl --output_dir "$demo/run" \
        --max_length 320 --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --data_workers 1 \
        --learning_rate 3e-3 --lr_scheduler_type constant --warmup_steps 5 \
        --max_steps "$1" --save_steps 20 --logging_steps 1 --resume auto
}

step "3/8  supervised fine-tuning on two ranks, steps 1 to 20"
train 20
step "4/8  the same command again: resumes at step 20, ends at 40"
train 40

step "5/8  export"
"$bin/python" -m common.export --checkpoint "$demo/run/checkpoint-000040" --output "$demo/export"

step "6/8  preference optimisation: the same questions, where a short answer is preferred to a whole sentence"
"$bin/torchrun" --standalone --nproc-per-node 2 -m dpo.train --config dpo/configs/tiny.yaml \
    --model_name_or_path "$demo/export" --train_files env/demo_pairs.jsonl --output_dir "$demo/dpo" \
    --max_length 320 --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --data_workers 1 \
    --beta 0.1 --loss_type sigmoid sft --loss_weights 1 0.2 --learning_rate 1e-3 --max_steps 20 --save_steps 20

step "7/8  rewards: questions about colours, answered by a letter; the model knows the form of an answer, rewards teach the right one"
"$bin/python" - "$demo" <<'PYTHON'
import json, random, sys
from pathlib import Path

demo, rng = Path(sys.argv[1]), random.Random(0)
colours = {"red": "a", "green": "b", "blue": "c", "yellow": "d"}
others = "morning evening small large warm cold water children story box river mountain apple spider one two three four five six".split()
pairs = [(other, colour) for other in others for colour in colours]
rng.shuffle(pairs)
rows = [
    {"id": f"{other}-{colour}", "prompt": [{"role": "user", "content": f"{other} {colour}"}], "answer": [colours[colour]]}
    for other, colour in pairs
]
for name, part in (("prompts", rows[:56]), ("held_out", rows[56:])):
    (demo / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
with open(demo / "form.jsonl", "w", encoding="utf-8") as file:
    for index in range(280):
        row = rows[index % 56]
        letter = row["answer"][0] if rng.random() < 0.3 else rng.choice("abcd")
        file.write(json.dumps({"messages": [*row["prompt"], {"role": "assistant", "content": f"[ans]{letter}[/ans]"}]}) + "\n")
PYTHON
"$bin/torchrun" --standalone --nproc-per-node 2 -m sft.train --config sft/configs/tiny.yaml \
    --model_name_or_path "$demo/dpo/final" --train_files "$demo/form.jsonl" --output_dir "$demo/form" --max_length 512 --max_steps 40 --save_steps 40
"$bin/torchrun" --standalone --nproc-per-node 2 -m grpo.train --config grpo/configs/tiny.yaml \
    --model_name_or_path "$demo/form/final" --train_files "$demo/prompts.jsonl" --eval_files "$demo/held_out.jsonl" --output_dir "$demo/grpo" \
    --reward_funcs grpo.rewards:choice_exact --eval_on_start True --eval_num_generations 8 --max_steps 24 --save_steps 24

step "8/8  what it has learnt"
"$bin/python" - "$demo" <<'PYTHON'
import json, sys
from pathlib import Path

import common  # quiets what transformers imports
from transformers import AutoModelForCausalLM, AutoTokenizer

demo = Path(sys.argv[1])
question = [{"role": "user", "content": "What is the capital of France?"}]
print(f"question: {question[0]['content']}")
answers = {}
for name, stage in (("model", "untrained"), ("export", "after SFT"), ("dpo/final", "after DPO")):
    tokenizer = AutoTokenizer.from_pretrained(demo / name)
    model = AutoModelForCausalLM.from_pretrained(demo / name)
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answers[name] = tokenizer.decode(ids, skip_special_tokens=True)
    print(f"{stage:9s}: {answers[name]!r}")


def metrics(run):
    return [json.loads(line) for line in (demo / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


losses = [(line["step"], line["loss"]) for line in metrics("run") if "loss" in line]
print("\nSFT step  loss")
for step, loss in losses:
    if step == 1 or step % 5 == 0:
        print(f"{step:8d}  {loss:6.3f}  {'#' * round(8 * loss)}")
preferences = metrics("dpo")
print("\nDPO step  loss  margin  accuracy")
for line in preferences:
    if line["step"] == 1 or line["step"] % 5 == 0:
        print(f"{line['step']:8d} {line['loss']:6.3f} {line['dpo/margin']:7.3f} {line['dpo/accuracy']:9.2f}")

before, after = (line for line in metrics("grpo") if "eval/reward" in line)
print("\nGRPO step  reward on held-out questions (share of right answers)")
for line in (before, after):
    print(f"{line['step']:9d}  {line['eval/reward']:6.3f}  {'#' * round(40 * line['eval/reward'])}")

steps = [step for step, _ in losses]
if steps != list(range(1, 41)):  # a step twice: the second run began anew
    sys.exit(f"metrics.jsonl should hold each step from 1 to 40 once; it holds {steps}")
if "Paris" not in answers["export"] or not losses[-1][1] < 0.1 * losses[0][1]:
    sys.exit("the model has not learnt: something is wrong with this installation")
first, last = preferences[0], preferences[-1]
if abs(first["dpo/margin"]) > 0.01 or last["dpo/accuracy"] < 0.9 or "capital" in answers["dpo/final"] or "Paris" not in answers["dpo/final"]:
    sys.exit("the preference was not learnt: something is wrong with this installation")
if not after["eval/reward"] > before["eval/reward"] + 0.2:
    sys.exit("rewards have not taught anything: something is wrong with this installation")
PYTHON

printf '\nThe demo took %d seconds after the set-up. Its files: %s\n' "$((SECONDS - start))" "$demo"
