"""Files over HTTP, in the shape of OpenAI's chat completions; needs the extra `serve` (starlette and uvicorn)."""
