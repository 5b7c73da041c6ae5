/* What both fake libraries have in common: the products, the state file, and what UUIDs look like (see build.py). */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* word, name, MiB, multiprocessors, CUDA cores of each, compute capability, what MIG can cut it into */
#define PRODUCTS(IT)                                                                                                   \
    IT("h200", "NVIDIA H200", 143771, 132, 128, 9, 0, H200_141)                                                        \
    IT("h100-80gb", "NVIDIA H100 80GB HBM3", 81559, 132, 128, 9, 0, H100_80)                                           \
    IT("a100-80gb", "NVIDIA A100-SXM4-80GB", 81920, 108, 64, 8, 0, A100_80)                                            \
    IT("a100-40gb", "NVIDIA A100-SXM4-40GB", 40960, 108, 64, 8, 0, A100_40)                                            \
    IT("a30", "NVIDIA A30", 24576, 56, 64, 8, 0, A30)                                                                  \
    IT("rtx4090", "NVIDIA GeForce RTX 4090", 24564, 128, 128, 8, 9, NULL)                                              \
    IT("v100", "Tesla V100-SXM2-16GB", 16384, 80, 64, 7, 0, NULL)                                                      \
    IT("p100", "Tesla P100-PCIE-16GB", 16384, 56, 64, 6, 0, NULL)

/* What the state file says now, of one word; the n-th such line, as text. */
static int line_of(const char *word, unsigned nth, char *rest, size_t size)
{
    const char *path = getenv("COTENANT_FAKE_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256];
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file)) {
        size_t length = strlen(word);
        if (!strncmp(line, word, length) && line[length] == ' ' && !nth--) {
            snprintf(rest, size, "%s", line + length + 1);
            found = 1;
        }
    }
    if (file)
        fclose(file);
    return found;
}

/* Whether it says that word of this GPU. */
static int said(const char *word, unsigned index)
{
    char rest[256];
    for (unsigned nth = 0; line_of(word, nth, rest, sizeof rest); nth++)
        if ((unsigned)atoi(rest) == index)
            return 1;
    return 0;
}

/* What this function has to answer; 0: nothing special. */
static int forced(const char *function)
{
    char rest[256], name[128];
    int code;
    for (unsigned nth = 0; line_of("error", nth, rest, sizeof rest); nth++)
        if (sscanf(rest, "%127s %d", name, &code) == 2 && !strcmp(name, function))
            return code;
    return 0;
}

/* Of a GPU or, where it has a number, of an instance on it. */
static void uuid_of(unsigned gpu, unsigned instance, char *text, size_t size)
{
    const char *salt = getenv("COTENANT_FAKE_SALT");
    snprintf(text, size, "%s-%08x-%04x-4000-8000-%012x", instance ? "MIG" : "GPU", gpu + 1,
             salt ? (unsigned)atoi(salt) & 0xffff : 0, instance);
}
