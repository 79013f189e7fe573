# Included by llama.cpp's project() through CMAKE_PROJECT_INCLUDE; see docs/dependencies.md.
# The package forces LLAMA_BUILD_COMMON on; a normal variable wins over the cache. We need libllama only.
set(LLAMA_BUILD_COMMON OFF)
# AMX tiles trap ("invalid opcode") in virtual machines that advertise them without saving their state.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  add_compile_options(-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
endif()
