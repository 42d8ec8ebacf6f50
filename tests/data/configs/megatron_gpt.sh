#!/bin/bash
# A GPT of 7.5B parameters on 128 GPUs.
GPT_ARGS=(
    --num-layers 36
    --hidden-size 4096
    --num-attention-heads 32
    --seq-length 2048
    --max-position-embeddings 2048
    --vocab-size 51200
    --attention-dropout 0.0
    --hidden-dropout 0.0
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 512
    --train-iters 5000
    --lr 1.2e-4
    --min-lr 1.2e-5
    --lr-decay-style cosine
    --lr-warmup-fraction .01
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --fp16
    --initial-loss-scale 65536
    --hysteresis 2
    --recompute-granularity full
    --recompute-method uniform
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 4
    --pipeline-model-parallel-size 2
    --sequence-parallel
    --use-distributed-optimizer
)
OTHER_ARGS=(
    --data-path "$DATA_PATH"
    --log-interval 10
    --save-interval 1000
    --save $CHECKPOINTS
)
torchrun --nproc_per_node 8 --nnodes 16 pretrain_gpt.py ${GPT_ARGS[@]} ${TRAINING_ARGS[@]}
