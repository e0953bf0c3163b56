"""Flags of llama-server that are none of ours."""

from __future__ import annotations

from .foreign_flag import ZERO, Flag

_FOR_SERVERS = "it is for 'edgeh2o serve'; leave it out"
SERVER_FLAGS = {
    name: flag
    for names, flag in (
        (
            "-cb --cont-batching",
            Flag("requests always share passes over the weights", idle=None),
        ),
        (
            "-kvu --kv-unified -no-kvu --no-kv-unified",
            Flag("every conversation has memory of its own", idle=None),
        ),
        ("-nocb --no-cont-batching", Flag("requests share passes over the weights", idle=None)),
        (
            "--cache-idle-slots --no-cache-idle-slots",
            Flag("conversations at rest are kept while memory has room", idle=None),
        ),
        (
            "-ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step",
            Flag("where prompts may go on from is marked by itself", "value", idle=None),
        ),
        (
            "--metrics --props --slots --no-slots",
            Flag("'edgeh2o serve' always has /metrics, /props and /slots", idle=None),
        ),
        (
            "--ui --webui --no-webui --no-ui --no-ui-mcp-proxy --no-webui-mcp-proxy",
            Flag("the page at / is always there, and calls this server alone", idle=None),
        ),
        ("--no-agent -no-ag", Flag("tools are run by clients", idle=None)),
        ("--cache-prompt --no-cache-prompt", Flag("what was read is always kept", idle=None)),
        ("--reasoning-preserve --no-reasoning-preserve", Flag("templates decide", idle=None)),
        ("--threads-http", Flag("one thread answers connections", "value", idle=None)),
        (
            "--cache-reuse",
            Flag("what prompts have in common is always kept", "value", idle=None),
        ),
        ("-np", Flag(_FOR_SERVERS, "value", "--parallel")),
        ("-a", Flag(_FOR_SERVERS, "value", "--alias")),
        ("-to", Flag(_FOR_SERVERS, "value", "--timeout")),
        (
            "--host --port --parallel --alias --tags --timeout --api-key --api-key-file "
            "--slot-save-path",
            Flag(_FOR_SERVERS, "value"),
        ),
        ("--kv-unified-per-slot", Flag("-c is that of each conversation", "value", idle=None)),
        ("--reuse-port", Flag("a port is that of one server", idle=None)),
        ("--path", Flag("files are served by a proxy before the server; leave it out", "value")),
        (
            "--ui-config --ui-config-file --webui-config --webui-config-file",
            Flag("the page at / keeps its own settings", "value", idle=None),
        ),
        ("--sse-ping-interval", Flag("streams say that they go on", "value", idle=None)),
        ("--log-prompts-dir", Flag("prompts are not logged; leave it out", "value")),
        ("--server-base", Flag("the page at / of a server is a chat with it", "value")),
        (
            "-sys --system --system-prompt -sysf --system-prompt-file",
            Flag("each conversation has its own system message", "value"),
        ),
        (
            "-cram --cache-ram",
            Flag(
                "--prefix-cache-ram of 'edgeh2o serve' bounds the memory of conversations",
                "value",
                "--prefix-cache-ram",
                idle=("-1",),
                spell="{}M".format,
            ),
        ),
        (
            "-sps --slot-prompt-similarity",
            Flag("the prompt that has most in common is taken", "value", idle=None),
        ),
        (
            "--embedding --embeddings",
            Flag("'edgeh2o serve' always has /v1/embeddings, 'edgeh2o embed' prints", idle=None),
        ),
        (
            "--pooling --embd-normalize",
            Flag("vectors are made by 'edgeh2o embed' and 'edgeh2o serve'", "value", idle=None),
        ),
        (
            "--rerank --reranking",
            Flag("'edgeh2o serve' always has /v1/rerank of reranking models", idle=None),
        ),
        ("--cls-separator", Flag("documents are ranked by 'edgeh2o embed'", "value", idle=None)),
        (
            "--ssl-key-file --ssl-cert-file",
            Flag("there is no TLS; put a proxy such as Caddy before the server", "value"),
        ),
        ("--models-dir --models-preset", Flag("a server has one model; start several", "value")),
        ("--models-max", Flag("a server has one model", "value", idle=None)),
        ("--models-autoload --no-models-autoload", Flag("a server has one model", idle=None)),
        (
            "--sleep-idle-seconds",
            Flag("a model stays in memory as long as its server runs", "value", idle=None),
        ),
        ("--cors-origins", Flag("", "value", "--cors")),
        (
            "--cors-methods --cors-headers",
            Flag("origins of --cors may send GET and POST with any headers", "value", idle=None),
        ),
        ("--cors-credentials", Flag("keys are sent as headers, not as cookies")),
        ("--no-cors-credentials", Flag("keys are sent as headers, not as cookies", idle=None)),
        ("--api-prefix", Flag("put a proxy before the server", "value")),
        (
            "--ui-mcp-proxy --webui-mcp-proxy --agent -ag",
            Flag("tools are run by clients; leave it out"),
        ),
        (
            "--tools --tools-runtime --mcp-servers-config --mcp-servers-json",
            Flag("tools are run by clients; leave it out", "value"),
        ),
        ("-j --json-schema --grammar", Flag("each request has its own", "value")),
        (
            "--presence-penalty --frequency-penalty",
            Flag("each request has its own; --repeat-penalty is for all", "value", idle=ZERO),
        ),
        ("-l --logit-bias", Flag("each request has its own (logit_bias)", "value")),
    )
    for name in names.split()
}
