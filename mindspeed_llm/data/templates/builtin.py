"""The templates that come with the package."""

from mindspeed_llm.data.templates.template import Template, Thinking

THINK = Thinking(opening="<think>\n", closing="\n</think>\n\n")

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
    Template(
        name="qwen3",
        system="<|im_start|>system\n{content}<|im_end|>\n",
        user="<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n",
        assistant="{content}<|im_end|>\n",
        observation="<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        next_observation="\n</tool_response>\n<tool_response>\n",
        tools="qwen",
        thinking=THINK,
        eos="<|im_end|>",
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
        name="deepseek3",
        prefix="{bos}",
        user="<｜User｜>{content}<｜Assistant｜>",
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
        default_system="You are ChatGPT, a large language model trained by OpenAI.",
        system="<|start|>system<|message|>{content}<|end|>",
        user="<|start|>user<|message|>{content}<|end|><|start|>assistant",
        assistant="{content}",
        thinking=Thinking(
            opening="<|channel|>analysis<|message|>",
            closing="<|end|><|start|>assistant<|channel|>final<|message|>",
        ),
        efficient_eos=True,
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
    Template(name="empty", user="{content}", assistant="{content}"),
)
