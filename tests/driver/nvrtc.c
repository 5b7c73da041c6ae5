/* A fake libnvrtc.so.13: it compiles nothing, and gives back the source, which the fake driver takes for a module. */

#include <stddef.h>
#include <string.h>

int nvrtcVersion(int *major, int *minor)
{
    *major = 13, *minor = 0;
    return 0;
}

const char *nvrtcGetErrorString(int code)
{
    return code ? "NVRTC_ERROR_OF_THE_FAKE" : "NVRTC_SUCCESS";
}

int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *names)
{
    (void)name, (void)texts, (void)names;
    *program = strdup(source);
    return headers;
}

int nvrtcCompileProgram(void *program, int count, const char *const *options)
{
    return !(program && count == 1 && !strncmp(options[0], "--gpu-architecture=sm_", 22));
}

int nvrtcGetProgramLogSize(void *program, size_t *size)
{
    (void)program;
    *size = 1;
    return 0;
}

int nvrtcGetProgramLog(void *program, char *log)
{
    (void)program;
    *log = 0;
    return 0;
}

int nvrtcGetCUBINSize(void *program, size_t *size)
{
    *size = strlen(program) + 1;
    return 0;
}

int nvrtcGetCUBIN(void *program, char *code)
{
    strcpy(code, program);
    return 0;
}
