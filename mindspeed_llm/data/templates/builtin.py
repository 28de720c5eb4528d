"""The templates that come with the package."""

from dataclasses import replace

from mindspeed_llm.data.templates.template import Template, Thinking

THINK = Thinking(opening="<think>\n", closing="\n</think>\n\n")

_QWEN3 = Template(
    name="qwen3",
    system="<|im_start|>system\n{content}<|im_end|>\n",
    user="<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n",
    assistant="{content}<|im_end|>\n",
    observation="<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    next_observation="\n</tool_response>\n<tool_response>\n",
    tools="qwen",
    thinking=THINK,
    eos="<|im_end|>",
)
_GEMMA = Template(
    name="gemma",
    prefix="{bos}",
    system="{content}\n\n",
    system_in_user=True,
    user="<start_of_turn>user\n{content}<end_of_turn>\n<start_of_turn>model\n",
    assistant="{content}<end_of_turn>\n",
    observation="<start_of_turn>tool\n{content}<end_of_turn>\n<start_of_turn>model\n",
    next_observation="<end_of_turn>\n<start_of_turn>tool\n",
    eos="<end_of_turn>",
)
_LLAMAFACTORY_DEEPSEEK = Template(
    name="deepseek3",
    prefix="{bos}",
    user="<｜User｜>{content}<｜Assistant｜>",
)
_DEEPSEEK3 = replace(
    _LLAMAFACTORY_DEEPSEEK,
    observation="<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{content}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    next_observation="<｜tool▁output▁end｜>\n<｜tool▁output▁begin｜>",
    tools="deepseek",
    llamafactory=_LLAMAFACTORY_DEEPSEEK,
)
_KIMI_VL = Template(
    name="kimi_vl",
    default_system="You are a helpful assistant",
    system="<|im_system|>system<|im_middle|>{content}<|im_end|>",
    user="<|im_user|>user<|im_middle|>{content}<|im_end|><|im_assistant|>assistant<|im_middle|>",
    assistant="{content}<|im_end|>",
    thinking=Thinking(opening="◁think▷", closing="◁/think▷"),
    eos="<|im_end|>",
)
_LLAMAFACTORY_GPT_OSS = Template(
    name="gpt_oss",
    default_system="You are ChatGPT, a large language model trained by OpenAI.",
    system="<|start|>system<|message|>{content}<|end|>",
    user="<|start|>user<|message|>{content}<|end|><|start|>assistant",
    assistant="{content}",
    thinking=Thinking(
        opening="<|channel|>analysis<|message|>",
        closing="<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    efficient_eos=True,
)

BUILTIN = (
    Template(
        name="chatml",
        system="<|im_start|>system\n{content}<|im_end|>\n",
        user="<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n",
        assistant="{content}<|im_end|>\n",
        observation="<|im_start|>tool\n{content}<|im_end|>\n<|im_start|>assistant\n",
        next_observation="<|im_end|>\n<|im_start|>tool\n",
        eos="<|im_end|>",
    ),
    _QWEN3,
    replace(
        _QWEN3,
        name="qwen",
        default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
        thinking=None,
    ),
    Template(
        name="llama3",
        prefix="{bos}",
        system="<|start_header_id|>system<|end_header_id|>\n\n{content}<|eot_id|>",
        user="<|start_header_id|>user<|end_header_id|>\n\n{content}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        assistant="{content}<|eot_id|>",
        observation="<|start_header_id|>ipython<|end_header_id|>\n\n{content}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        next_observation="<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n",
        tools="llama3",
        eos="<|eot_id|>",
    ),
    Template(
        name="llama2",
        system="<<SYS>>\n{content}\n<</SYS>>\n\n",
        system_in_user=True,
        user="{bos}[INST] {content} [/INST]",
    ),
    _DEEPSEEK3,
    replace(
        _DEEPSEEK3,
        name="deepseekr1",
        thinking=THINK,
        llamafactory=replace(_LLAMAFACTORY_DEEPSEEK, name="deepseekr1", thinking=THINK),
    ),
    _GEMMA,
    replace(_GEMMA, name="gemma2", eos=None, efficient_eos=True),
    Template(
        name="phi4",
        system="<|im_start|>system<|im_sep|>{content}<|im_end|>",
        user="<|im_start|>user<|im_sep|>{content}<|im_end|><|im_start|>assistant<|im_sep|>",
        assistant="{content}<|im_end|>",
        eos="<|im_end|>",
    ),
    Template(
        name="minimax1",
        default_system="You are a helpful assistant.",
        system="<beginning_of_sentence>system ai_setting=assistant\n{content}<end_of_sentence>\n",
        user="<beginning_of_sentence>user name=user\n{content}<end_of_sentence>\n"
        "<beginning_of_sentence>ai name=assistant\n",
        assistant="{content}<end_of_sentence>\n",
        observation="<beginning_of_sentence>tool name=tools\n{content}<end_of_sentence>\n"
        "<beginning_of_sentence>ai name=assistant\n",
        next_observation="<end_of_sentence>\n<beginning_of_sentence>tool name=tools\n",
        tools="minimax1",
        eos="<end_of_sentence>",
    ),
    Template(
        name="minimax2",
        default_system="You are a helpful assistant. Your name is MiniMax-M2.1 and is built by MiniMax.",
        system="]~!b[]~b]system\n{content}[e~[\n",
        user="]~b]user\n{content}[e~[\n]~b]ai\n",
        assistant="{content}[e~[\n",
        observation="]~b]tool\n<response>{content}</response>[e~[\n]~b]ai\n",
        next_observation="</response>\n<response>",
        tools="minimax2",
        thinking=THINK,
        eos="[e~[",
    ),
    _KIMI_VL,
    replace(
        _KIMI_VL,
        name="kimi",
        prefix="{tools}",
        observation="<|im_system|>tool<|im_middle|>{content}<|im_end|><|im_assistant|>assistant<|im_middle|>",
        next_observation="<|im_end|><|im_system|>tool<|im_middle|>",
        tools="kimi",
        thinking=None,
    ),
    Template(
        name="glm4",
        prefix="[gMASK]<sop>",
        system="<|system|>\n{content}",
        user="<|user|>\n{content}<|assistant|>",
        assistant="\n{content}",
        function="{content}",
        observation="<|observation|>\n{content}<|assistant|>",
        next_observation="<|observation|>\n",
        tools="glm4",
        efficient_eos=True,
    ),
    Template(
        name="gpt_oss",
        prefix="<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: {date}\n\nReasoning: medium\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.{tools}<|end|>",
        system="<|start|>developer<|message|>{content}<|end|>",
        instructions="# Instructions\n\n{content}\n\n",
        user=_LLAMAFACTORY_GPT_OSS.user,
        assistant="{content}",
        function="{content}",
        observation="<|start|>{content}<|end|><|start|>assistant",
        next_observation="<|end|><|start|>",
        tools="harmony",
        thinking=Thinking(
            opening="<|channel|>analysis<|message|>",
            closing="<|end|><|start|>assistant<|channel|>final<|message|>",
            nothing="<|channel|>final<|message|>",
        ),
        efficient_eos=True,
        end_of_history="<|end|>",
        calls_end=True,
        llamafactory=_LLAMAFACTORY_GPT_OSS,
    ),
    Template(
        name="mistral",
        prefix="{bos}",
        system="{content}\n\n",
        system_in_user=True,
        user="[INST] {content}[/INST]",
        assistant=" {content}{eos}",
        function="[TOOL_CALLS] {content}{eos}",
        observation='[TOOL_RESULTS] {"content": {content}}[/TOOL_RESULTS]',
        next_observation='}[/TOOL_RESULTS][TOOL_RESULTS] {"content": ',
        tools="mistral",
    ),
    Template(
        name="default",
        system="System: {content}{eos}\n",
        user="Human: {content}{eos}\nAssistant:",
        assistant="{content}{eos}\n",
    ),
    Template(
        name="alpaca",
        default_system="Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n",
        user="### Instruction:\n{content}\n\n### Response:\n",
        assistant="{content}{eos}\n\n",
    ),
    Template(name="empty", user="{content}", assistant="{content}"),
)

ALIASES = {"gemma3": "gemma", "minimax": "minimax2"}
"""Other names: of a family whose newest member is meant, and of a member that writes as another does."""
