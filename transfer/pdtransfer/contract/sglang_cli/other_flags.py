"""Every other flag of SGLang 0.5.23, by kind: names without their dashes, further names after a comma, the name
of the setting after `>` where it is not the flag's first name.

No rule of fit reads them. But argparse takes an abbreviation only where one flag begins so, and a flag's kind says
which arguments are its values.
"""

from __future__ import annotations

from pdtransfer.contract.sglang_cli.kinds import Kind

OTHER: dict[Kind, str] = {
    Kind.SWITCH: """
        abort-on-priority-when-disabled allow-auto-truncate checkpoint-engine-wait-weights-before-ready
        constrained-json-disable-any-whitespace debug-cuda-graph delete-ckpt-after-loading
        disable-aiter-allreduce-fusion-in-decode disable-aiter-allreduce-fusion-in-prefill disable-attn-tp-gather
        disable-chunked-prefix-cache disable-cuda-graph disable-cuda-graph-padding disable-custom-all-reduce
        disable-decode-cuda-graph disable-fast-image-processor disable-flashinfer-autotune
        disable-flashinfer-cutlass-moe-fp4-allgather disable-outlines-disk-cache
        disable-overlap-schedule disable-prefill-cuda-graph disable-shared-experts-fusion disable-tokenizer-batch-decode
        enable-adaptive-dispatch-to-encoder enable-aiter-allreduce-fusion enable-amd-monokernel
        enable-attn-tp-input-scattered enable-broadcast-mm-inputs-process enable-cache-report enable-cp-decode-attn-tp
        enable-cudagraph-gc enable-custom-logit-processor enable-deepseek-v4-fp4-indexer enable-dense-mlp-attn-tp
        enable-dp-attention-local-control-broadcast enable-dp-lm-head
        enable-draft-weights-cpu-backup enable-dynamic-batch-tokenizer enable-dynamic-chunking
        enable-elastic-expert-backup enable-encoder-swa-bounded-replay enable-eplb enable-flashinfer-allreduce-fusion
        enable-flexkv enable-forward-pass-metrics enable-fp32-lm-head enable-fused-moe-sum-all-reduce
        enable-http-worker-reuseport enable-http2 enable-int8-mamba-checkpoint enable-layernorm-sp
        enable-layerwise-nvtx-marker enable-lean-attention enable-linker-mla-dedup enable-lora
        enable-lora-overlap-loading enable-mamba-cache-stochastic-rounding enable-megamoe-for-layernorm-sp
        enable-memory-saver enable-metrics enable-metrics-for-all-schedulers enable-mfu-metrics enable-mis
        enable-mm-global-cache enable-mscclpp enable-multimodal enable-nccl-nvls enable-nvidia-megakernel
        enable-p2p-check enable-page-major-kv-layout enable-paged-experts enable-precise-embedding-interpolation
        enable-prefill-delayer enable-prefix-mm-cache enable-profile-cuda-graph enable-quant-communications
        enable-request-time-stats-logging enable-return-aux-hidden-states enable-return-hidden-states
        enable-return-indexer-topk enable-return-routed-experts enable-scattered-sconv enable-session-radix-cache
        enable-shared-experts-attn-tp enable-single-batch-overlap enable-ssl-refresh enable-streaming-session
        enable-strict-thinking enable-symm-mem enable-tokenizer-batch-encode enable-torch-compile
        enable-torch-compile-debug-mode enable-torch-symm-mem enable-trace enable-two-batch-overlap
        enable-unified-cache-external-linker enable-w4a4-mxfp4-megamoe enable-waterfill enable-weights-cpu-backup
        encoder-only enforce-disable-flashinfer-allreduce-fusion enforce-shared-experts-fusion export-metrics-to-file
        flashinfer-mla-disable-ragged grpc-mode incremental-streaming-output is-embedding language-model-only
        language-only log-requests lora-use-virtual-experts mlx-enable-sampling pre-warm-nccl
        prefill-only-disable-kv-cache quantize-and-serve remote-instance-weight-loader-start-seed-via-transfer-engine
        return-input-ids return-output-ids schedule-low-priority-values-first show-time-cost skip-server-warmup
        skip-tokenizer-init sleep-on-idle smg-grpc-mode speculative-dspark-align-verify-tokens-to-graph-tier
        speculative-use-block-verification speculative-use-rejection-sampling stream-response-default-include-usage
        strip-thinking-cache triton-attention-reduce-in-fp32 trust-mm-content-hashes trust-remote-code
        trust-request-chat-template weight-loader-disable-mmap weight-loader-drop-cache-after-load
        weight-loader-prefetch-checkpoints
    """,
    Kind.PAIR: """
        dcp-replicate-q-proj dllm-fdfo enable-decoder-swa-bounded-replay enable-dsa-fused-indexer
        enable-fused-qk-norm-rope enable-tf32-matmul enable-tp-lm-head-all-to-all experts-shared-outer-loras
        lora-strict-loading mm-enable-dp-encoder ple-offload-embedding speculative-enable-w4a4-mxfp4-megamoe
    """,
    Kind.TEXT: """
        admin-api-key api-key bf16-gemm-backend boundary-reduction chat-template completion-template
        constrained-json-whitespace-pattern crash-dump-folder cuda-graph-backend-decode
        cuda-graph-backend-prefill cuda-graph-config dcp-comm-backend debug-tensor-dump-input-file
        debug-tensor-dump-output-folder decoupled-spec-bind-endpoint decoupled-spec-role decrypted-config-file
        decrypted-draft-config-file deepep-config deepep-dispatcher-output-dtype deepep-mode deepep-v2-mode
        dllm-algorithm-config download-dir dsa-paged-mqa-logits-backend dsa-topk-backend dsv4-prefill-backend
        elastic-ep-backend elastic-ep-join-mode>ep_join_mode encoder-transfer-backend ep-dispatch-algorithm
        eplb-algorithm expert-balancedness-report-mode expert-distribution-recorder-mode export-metrics-to-file-dir
        fastapi-root-path file-storage-path flashinfer-a2a-dispatch-type flashinfer-allreduce-fusion-backend
        flashinfer-mxfp4-moe-precision flexkv-config-file forward-pass-metrics-ipc-name forward-pass-metrics-worker-id
        fp4-gemm-backend>fp4_gemm_runner_backend fp8-gemm-backend>fp8_gemm_runner_backend grammar-backend
        hf-chat-template-name hicache-storage-backend-extra-config hicache-storage-prefetch-policy
        image-processor-backend init-expert-location kt-method kt-weight-path kv-canary kv-canary-real-data
        kv-events-config linear-attn-backend linear-attn-decode-backend linear-attn-prefill-backend
        linear-attn-verify-backend lmcache-config-file load-format load-publish-endpoint log-level log-level-http
        log-requests-format lora-backend lora-eviction-policy mamba-backend mm-attention-backend mm-feature-transport
        mm-global-cache-backend model-config-parser model-impl model-loader-extra-config modelexpress-config
        modelopt-checkpoint-restore-path modelopt-checkpoint-save-path modelopt-export-path modelopt-quant
        moe-runner-backend monokernel-backend>enable_amd_monokernel mooncake-ib-device msprobe-dump-config offload-mode
        otlp-service-name otlp-traces-endpoint pdmux-config-path ple-offload-backend ple-offload-dir
        prefill-kv-cache-dequant-dtype qsa-indexer-dtype quantization-param-path radix-cache-backend
        radix-eviction-policy reasoning-parser remote-instance-weight-loader-backend
        remote-instance-weight-loader-seed-instance-ip retraction-policy return-hidden-states-mode rl-on-policy-target
        rl-quant-profile sampling-backend sampling-defaults schedule-policy sidecar spec-trace-dir
        speculative-adaptive-config speculative-attention-mode speculative-draft-attention-backend
        speculative-draft-load-format speculative-draft-model-quantization speculative-draft-model-revision
        speculative-dsa-topk-backend speculative-dspark-confidence-sts-path speculative-dspark-sps-table-path
        speculative-moe-a2a-backend speculative-moe-runner-backend speculative-ngram-external-corpus-path
        speculative-ngram-match-type speculative-token-map ssl-ca-certs ssl-certfile ssl-keyfile ssl-keyfile-password
        startup-weight-load-mode tokenizer-backend tokenizer-metrics-custom-labels-header tokenizer-mode tokenizer-path
        tool-call-parser tool-server trace-modules unified-cache-external-linker-backend uno-lora-path warmups
        watermark-config weight-cache-mode weight-cache-socket weight-version
    """,
    Kind.INT: """
        asr-max-buffer-seconds asr-max-concurrent-sessions batch-notify-size c128-page-size
        constrained-json-max-whitespace-cnt cpu-offload-gb cuda-graph-max-bs-decode cuda-graph-max-bs-prefill
        cuda-graph-max-seq-len-prefill decode-log-interval decoupled-spec-rank default-priority-value
        detokenizer-worker-num disaggregation-decode-polling-interval dist-timeout dsa-triton-union dwdp-size
        dynamic-batch-tokenizer-batch-size elastic-ep-initial-size elastic-ep-join-rank-offset>ep_join_rank_offset
        encoder-bootstrap-port engine-info-bootstrap-port ep-num-redundant-experts eplb-rebalance-layers-per-chunk
        eplb-rebalance-num-iterations expert-distribution-recorder-buffer-size fuseep-mode gated-launch-port
        grpc-port grpc-response-timeout-secs hicache-storage-prefetch-retry-max-attempts
        hicache-storage-prefetch-retry-poll-interval http2-initial-connection-window-size http2-max-concurrent-streams
        int8-mamba-ckpt-size kt-cpuinfer kt-max-deferred-experts-per-token kt-num-gpu-experts kt-threadpool-count
        kv-canary-sweep-interval linear-replayssm-cache-len load-snapshot-publish-interval log-requests-level
        mamba-cache-philox-rounds mamba-max-states-per-path mamba-track-interval max-ep-size max-loaded-loras
        max-lora-chunk-size max-lora-rank max-loras-per-batch max-mamba-cache-size max-queued-requests
        media-url-max-file-size-mb min-free-slots-delay mm-io-worker-num mm-preprocess-cache-size-mb
        mm-processor-worker-num moe-dense-tp-size moe-dp-size,moe-data-parallel-size nccl-port
        num-continuous-decode-steps num-reserved-decode-tokens offload-group-size offload-num-in-group
        offload-prefetch-step paged-experts-num-resident pp-async-batch-depth pp-max-micro-batch-size
        prefill-decode-interval prefill-decode-interval-min-bs prefill-delayer-max-delay-passes prefill-max-requests
        priority-scheduling-preemption-threshold random-seed remote-instance-weight-loader-seed-instance-service-port
        scheduler-recv-interval shared-experts-tp-size sm-group-num smg-http-sidecar-port,grpc-http-sidecar-port
        speculative-dflash-block-size speculative-domino-candidate-pool-size speculative-draft-sink-size
        speculative-draft-window-size speculative-dspark-block-size speculative-ngram-capacity
        speculative-ngram-external-corpus-max-tokens speculative-ngram-external-sam-budget
        speculative-ngram-max-trie-depth speculative-ngram-min-bfs-breadth
        speculative-num-steps stream-interval swa-prefix-tails tokenizer-worker-num torch-compile-max-bs
        triton-attention-num-kv-splits triton-attention-split-tile-size weight-cache-timeout
        weight-loader-prefetch-num-threads
    """,
    Kind.FLOAT: """
        dynamic-batch-tokenizer-batch-timeout elastic-ep-scale-timeout eplb-min-rebalancing-utilization-threshold
        gc-warning-threshold-secs lora-drain-wait-threshold mamba-full-memory-ratio mem-fraction-static
        prefill-delayer-max-delay-ms prefill-delayer-queue-min-ratio prefill-delayer-token-usage-low-watermark
        schedule-conservativeness soft-watchdog-timeout speculative-accept-threshold-acc
        speculative-accept-threshold-single swa-full-tokens-ratio tbo-token-distribution-threshold watchdog-timeout
    """,
    Kind.TOKENS: """
        cuda-graph-prefill-max-context,context-bucket
    """,
    Kind.JSON: """
        decoupled-spec-connect-endpoints default-chat-template-kwargs extra-metric-labels forward-hooks
        limit-mm-data-per-request mm-process-config preferred-sampling-params radix-eviction-policy-config
        remote-instance-weight-loader-send-weights-group-ports sidecar-args unified-cache-external-linker-config
    """,
    Kind.INTS: """
        cuda-graph-bs-decode cuda-graph-bs-prefill debug-tensor-dump-layers gc-threshold numa-node
        return-aux-hidden-state-layer-ids
    """,
    Kind.FLOATS: """
        bucket-e2e-request-latency bucket-inter-token-latency bucket-time-to-first-token
        prefill-delayer-forward-passes-buckets prefill-delayer-wait-seconds-buckets
    """,
    Kind.TEXTS: """
        allowed-media-domains encoder-register-urls encoder-urls flashinfer-autotune-skip-ops generation-tokens-buckets
        log-requests-target prompt-tokens-buckets tokenizer-metrics-allowed-custom-labels
    """,
    Kind.MAYBE_TEXTS: """
        custom-weight-loader lora-paths lora-target-modules uvicorn-access-log-exclude-prefixes
    """,
    Kind.MAYBE_TEXT: """
        model-checksum
    """,
}
