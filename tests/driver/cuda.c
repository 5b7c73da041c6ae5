/* A fake libcuda.so.1: what cuda.bindings asks of the CUDA driver for green contexts, answered for the GPUs that the
   environment names (see build.py). Nothing here computes.

   It holds callers to the rules of cuda.h: a descriptor's resources come from one split of one device and are aligned
   alike (what a split leaves is not, here), a context has them for good, a stream is destroyed before its context. The state file may also have `limit contexts N`: so many
   green contexts fit. `cotenant_fake_counts` says what there is. Of kernels it knows those of tests/gpu/kernels.cu:
   `where` leaves its marks, and `compute` takes the time, on the stream's own clock, that its multiprocessors need. */

#include "machine.h"

#include <stddef.h>
#include <stdint.h>

enum {
    OK, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_SUPPORTED = 801, INVALID_RESOURCE_TYPE = 914,
    INVALID_RESOURCE_CONFIGURATION = 915, UNKNOWN = 999,
};
#define MOST 8
#define STEP_TOLD 13000 /* CUDA, since which resources tell their least size */
#define GREEN_SINCE 12040

/* The machine */

typedef struct {
    const char *word, *name;
    unsigned long long mib;
    int multiprocessors, major, minor;
} Product;

#define ROW(word, name, mib, multiprocessors, cores, major, minor, profiles)                                           \
    {word, name, mib, multiprocessors, major, minor},
static const Product products[] = {PRODUCTS(ROW)};

typedef struct {
    const Product *product;
    unsigned index; /* of the machine; a process may see it by another number */
    int retained;   /* its primary context */
} Gpu;

static Gpu gpus[MOST];
static int many, initialised;

typedef struct { /* CUdevResource of cuda.h, with what we remember in its padding */
    int type;
    struct {
        uint32_t split, group; /* split 0: the whole device; group: the rest is the one after the last */
        int device;
        unsigned char padding[80];
    } own;
    struct {
        uint32_t count, least, aligned;
        unsigned char padding[36];
    } sm;
} Resource;
_Static_assert(sizeof(Resource) == 144 && offsetof(Resource, sm) == 96, "as in cuda.h");

typedef struct {
    int device;
    uint32_t split, count;
    uint64_t groups; /* one bit each */
} Description;

typedef struct Context {
    Description has;
    int streams, there;
} Context;

typedef struct {
    uint64_t marks; /* device memory, which is memory of the host here */
    const Context *on;
} Graph;

typedef struct {
    Context *of;
    double clock; /* milliseconds of work so far */
    Graph *recording;
} Stream;

static unsigned sizes[MOST]; /* of the groups of the last split, by device */
static uint32_t splits;
static int contexts, streams, leaked;

void cotenant_fake_counts(int *into)
{
    int retained = 0;
    for (int i = 0; i < many; i++)
        retained += gpus[i].retained;
    into[0] = contexts, into[1] = streams, into[2] = leaked, into[3] = retained, into[4] = (int)splits;
}

/* The groups that a stream's kernels would run on, one bit each. */
uint64_t cotenant_fake_groups(const Stream *stream)
{
    return stream->of->has.groups;
}

static int limit(void)
{
    char rest[256];
    int most;
    return line_of("limit", 0, rest, sizeof rest) && sscanf(rest, "contexts %d", &most) == 1 ? most : 1 << 30;
}

#define FAILS()                                                                                                        \
    do {                                                                                                               \
        int code_ = forced(__func__);                                                                                  \
        if (code_ != OK)                                                                                               \
            return code_;                                                                                              \
    } while (0)
#define ENTER()                                                                                                        \
    do {                                                                                                               \
        FAILS();                                                                                                       \
        if (!initialised)                                                                                              \
            return NOT_INITIALIZED;                                                                                    \
    } while (0)
#define ENTER_DEVICE(device)                                                                                           \
    do {                                                                                                               \
        ENTER();                                                                                                       \
        if ((device) < 0 || (device) >= many)                                                                          \
            return INVALID_DEVICE;                                                                                     \
        if (said("lost", gpus[device].index))                                                                                  \
            return UNKNOWN;                                                                                            \
    } while (0)

static int version(void)
{
    const char *text = getenv("COTENANT_FAKE_DRIVER");
    int major = 13, minor = 0;
    const char *slash = text ? strchr(text, '/') : NULL;
    if (slash)
        sscanf(slash + 1, "%d.%d", &major, &minor);
    return 1000 * major + 10 * minor;
}

static int visible(unsigned index)
{
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    char text[1024], uuid[64], number[16];
    if (!wanted)
        return 1;
    uuid_of(index, 0, uuid, sizeof uuid);
    snprintf(number, sizeof number, "%u", index);
    snprintf(text, sizeof text, "%s", wanted);
    for (char *keep, *one = strtok_r(text, ",", &keep); one; one = strtok_r(NULL, ",", &keep))
        if (!strcmp(one, uuid) || !strcmp(one, number))
            return 1;
    return 0;
}

int cuInit(unsigned flags)
{
    FAILS();
    const char *wanted = getenv("COTENANT_FAKE_GPUS");
    if (flags)
        return INVALID_VALUE;
    if (!wanted)
        return NO_DEVICE;
    char text[1024];
    snprintf(text, sizeof text, "%s", wanted);
    many = 0;
    unsigned index = 0;
    for (char *keep, *one = strtok_r(text, ",", &keep); one; one = strtok_r(NULL, ",", &keep), index++) {
        if (many == MOST || said("lost", index) || !visible(index))
            continue;
        for (size_t i = 0; i < sizeof products / sizeof *products; i++)
            if (!strcmp(products[i].word, one))
                gpus[many++] = (Gpu){&products[i], index, 0};
    }
    initialised = 1;
    return many ? OK : NO_DEVICE;
}

int cuDriverGetVersion(int *number)
{
    FAILS();
    *number = version();
    return OK;
}

int cuGetErrorName(int code, const char **text)
{
    *text = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_THE_FAKE_DRIVER";
    return OK;
}

int cuGetErrorString(int code, const char **text)
{
    *text = code == OUT_OF_MEMORY ? "out of memory" : code == NO_DEVICE ? "no CUDA-capable device is detected" : "unknown error";
    return OK;
}

/* Devices */

int cuDeviceGetCount(int *count)
{
    ENTER();
    *count = many;
    return OK;
}

int cuDeviceGet(int *device, int number)
{
    ENTER_DEVICE(number);
    *device = number;
    return OK;
}

int cuDeviceGetName(char *text, int size, int device)
{
    ENTER_DEVICE(device);
    snprintf(text, (size_t)size, "%s", gpus[device].product->name);
    return OK;
}

int cuDeviceGetUuid_v2(unsigned char *bytes, int device)
{
    ENTER_DEVICE(device);
    memset(bytes, 0, 16);
    bytes[3] = (unsigned char)(gpus[device].index + 1), bytes[6] = 0x40, bytes[8] = 0x80;
    return OK;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    ENTER_DEVICE(device);
    *bytes = gpus[device].product->mib << 20;
    return OK;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    ENTER_DEVICE(device);
    const Product *product = gpus[device].product;
    *value = attribute == 16 ? product->multiprocessors : attribute == 75 ? product->major : product->minor;
    return attribute == 16 || attribute == 75 || attribute == 76 ? OK : NOT_SUPPORTED;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    ENTER_DEVICE(device);
    gpus[device].retained++;
    *context = &gpus[device];
    return OK;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    ENTER_DEVICE(device);
    if (!gpus[device].retained)
        return INVALID_CONTEXT;
    gpus[device].retained--;
    return OK;
}

/* Multiprocessors */

static unsigned step(const Product *product)
{
    return product->major >= 9 ? 8 : product->major == 8 ? 4 : 2;
}

static Resource resource(int device, uint32_t split, uint32_t group, unsigned count)
{
    unsigned least = version() >= STEP_TOLD ? step(gpus[device].product) : 0;
    unsigned aligned = count < least ? 2 : least; /* the rest has not the guarantees of groups */
    return (Resource){.type = 1, .own = {split, group, device, {0}}, .sm = {count, least, aligned, {0}}};
}

int cuDeviceGetDevResource(int device, Resource *whole, int type)
{
    ENTER_DEVICE(device);
    if (type != 1)
        return INVALID_RESOURCE_TYPE;
    *whole = resource(device, 0, 0, (unsigned)gpus[device].product->multiprocessors);
    return OK;
}

int cuDevSmResourceSplitByCount(Resource *result, unsigned *count, const Resource *input, Resource *rest, unsigned flags,
                                unsigned least)
{
    ENTER();
    if (!count || !input || flags)
        return INVALID_VALUE;
    if (input->type != 1)
        return INVALID_RESOURCE_TYPE;
    if (input->own.split) /* "the output results cannot be split again" */
        return INVALID_RESOURCE_CONFIGURATION;
    int device = input->own.device;
    unsigned by = step(gpus[device].product), size = (least + by - 1) / by * by;
    if (!size || size > input->sm.count)
        return INVALID_RESOURCE_CONFIGURATION;
    unsigned fits = input->sm.count / size;
    if (!result) {
        *count = fits;
        return OK;
    }
    *count = *count < fits ? *count : fits;
    splits++, sizes[device] = size;
    for (unsigned i = 0; i < *count; i++)
        result[i] = resource(device, splits, i, size);
    if (rest)
        *rest = resource(device, splits, *count, input->sm.count - *count * size);
    return OK;
}

int cuDevResourceGenerateDesc(Description **described, Resource *resources, unsigned count)
{
    ENTER();
    if (!described || !resources || !count)
        return INVALID_VALUE;
    Description *made = calloc(1, sizeof *made);
    made->device = resources[0].own.device, made->split = resources[0].own.split;
    for (unsigned i = 0; i < count; i++) {
        uint64_t bit = 1ull << resources[i].own.group;
        if (resources[i].type != 1 || resources[i].own.device != made->device || resources[i].own.split != made->split ||
            resources[i].sm.aligned != resources->sm.aligned || made->groups & bit || !resources[i].sm.count) {
            free(made);
            return INVALID_RESOURCE_CONFIGURATION;
        }
        made->groups |= bit, made->count += resources[i].sm.count;
    }
    if (!made->split) { /* the whole device, which is more than any of its groups */
        unsigned size = sizes[made->device] ? sizes[made->device] : made->count;
        made->groups = (1ull << (made->count + size - 1) / size) - 1;
    }
    *described = made;
    return OK;
}

int cuGreenCtxCreate(Context **made, Description *described, int device, unsigned flags)
{
    ENTER_DEVICE(device);
    if (!described || described->device != device || flags != 1)
        return INVALID_VALUE;
    if (contexts >= limit())
        return OUT_OF_MEMORY;
    Context *context = calloc(1, sizeof *context);
    *context = (Context){*described, 0, 1};
    contexts++, gpus[device].retained++;
    *made = context;
    return OK;
}

int cuGreenCtxGetDevResource(Context *context, Resource *has, int type)
{
    ENTER();
    if (!context || !context->there)
        return INVALID_CONTEXT;
    if (type != 1)
        return INVALID_RESOURCE_TYPE;
    *has = resource(context->has.device, 0, 0, context->has.count);
    return OK;
}

int cuGreenCtxDestroy(Context *context)
{
    ENTER();
    if (!context || !context->there)
        return INVALID_CONTEXT;
    leaked += context->streams;
    context->there = 0;
    contexts--, gpus[context->has.device].retained--;
    return OK;
}

int cuGreenCtxStreamCreate(Stream **made, Context *context, unsigned flags, int priority)
{
    ENTER();
    (void)priority;
    if (!context || !context->there)
        return INVALID_CONTEXT;
    if (flags != 1) /* CU_STREAM_NON_BLOCKING must be specified */
        return INVALID_VALUE;
    Stream *stream = calloc(1, sizeof *stream);
    stream->of = context, context->streams++, streams++;
    *made = stream;
    return OK;
}

int cuStreamGetGreenCtx(Stream *stream, Context **context)
{
    ENTER();
    if (!stream)
        return INVALID_HANDLE;
    *context = stream->of;
    return OK;
}

int cuStreamDestroy_v2(Stream *stream)
{
    ENTER();
    if (!stream || !stream->of->there)
        return INVALID_HANDLE;
    stream->of->streams--, streams--;
    free(stream);
    return OK;
}

/* Memory, and what runs */

static unsigned long long allocated;

int cuMemAlloc_v2(uint64_t *made, size_t size)
{
    ENTER();
    size_t *block = calloc(1, size + sizeof *block);
    *block = size, allocated += size;
    *made = (uint64_t)(uintptr_t)(block + 1);
    return OK;
}

int cuMemFree_v2(uint64_t memory)
{
    ENTER();
    size_t *block = (size_t *)(uintptr_t)memory - 1;
    allocated -= *block;
    free(block);
    return OK;
}

int cuMemGetInfo_v2(size_t *left, size_t *total)
{
    ENTER();
    *total = gpus[0].product->mib << 20;
    *left = *total - allocated - ((size_t)contexts << 20);
    return OK;
}

int cuMemsetD32_v2(uint64_t memory, unsigned value, size_t count)
{
    ENTER();
    for (size_t i = 0; i < count; i++)
        ((unsigned *)(uintptr_t)memory)[i] = value;
    return OK;
}

int cuMemcpyDtoH_v2(void *host, uint64_t memory, size_t size)
{
    ENTER();
    memcpy(host, (void *)(uintptr_t)memory, size);
    return OK;
}

int cuCtxSetCurrent(void *context)
{
    ENTER();
    return context ? OK : INVALID_CONTEXT;
}

int cuCtxSynchronize(void)
{
    ENTER();
    return OK;
}

int cuModuleLoadData(void **module, const void *image)
{
    ENTER();
    *module = (void *)image;
    return image ? OK : INVALID_VALUE;
}

int cuModuleGetFunction(const char **function, void *module, const char *name)
{
    ENTER();
    *function = !strcmp(name, "where") ? "where" : !strcmp(name, "compute") ? "compute" : NULL;
    return module && *function ? OK : NOT_FOUND;
}

static void mark(const Context *context, uint64_t memory)
{
    unsigned first = 0;
    int device = context->has.device;
    for (unsigned group = 0; group < 64; group++) {
        unsigned all = (unsigned)gpus[device].product->multiprocessors, size = sizes[device];
        for (unsigned i = first; i < first + size && i < all; i++)
            ((unsigned *)(uintptr_t)memory)[i] += context->has.groups >> group & 1;
        first += size;
    }
}

int cuLaunchKernel(const char *function, unsigned blocks, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                   unsigned shared, Stream *stream, void **values, void **extra)
{
    ENTER();
    (void)shared, (void)extra;
    if (!function || !stream || y != 1 || z != 1 || ty != 1 || tz != 1 || !threads || threads > 1024)
        return INVALID_VALUE;
    if (said("lost", gpus[stream->of->has.device].index))
        return UNKNOWN;
    if (!strcmp(function, "compute")) {
        stream->clock += 1e-6 * *(int *)values[1] * blocks / stream->of->has.count;
        return OK;
    }
    if (stream->recording)
        *stream->recording = (Graph){*(uint64_t *)values[0], stream->of};
    else
        mark(stream->of, *(uint64_t *)values[0]);
    return OK;
}

int cuStreamBeginCapture_v2(Stream *stream, int mode)
{
    ENTER();
    if (!stream || stream->recording || mode < 0 || mode > 2)
        return INVALID_VALUE;
    stream->recording = calloc(1, sizeof(Graph));
    return OK;
}

int cuStreamEndCapture(Stream *stream, Graph **graph)
{
    ENTER();
    *graph = stream->recording;
    stream->recording = NULL;
    return *graph ? OK : INVALID_VALUE;
}

int cuGraphInstantiateWithFlags(Graph **ready, Graph *graph, unsigned long long flags)
{
    ENTER();
    *ready = graph;
    return graph && !flags ? OK : INVALID_VALUE;
}

int cuGraphLaunch(Graph *graph, Stream *stream)
{
    ENTER();
    if (!graph || !stream)
        return INVALID_HANDLE;
    mark(graph->on, graph->marks); /* where it was recorded, whatever the stream */
    return OK;
}

int cuStreamSynchronize(Stream *stream)
{
    ENTER();
    return stream && said("lost", gpus[stream->of->has.device].index) ? UNKNOWN : OK;
}

int cuEventCreate(double **event, unsigned flags)
{
    ENTER();
    *event = calloc(1, sizeof **event);
    return flags ? INVALID_VALUE : OK;
}

int cuEventRecord(double *event, Stream *stream)
{
    ENTER();
    *event = stream->clock;
    return OK;
}

int cuEventElapsedTime_v2(float *milliseconds, const double *begun, const double *ended)
{
    ENTER();
    *milliseconds = (float)(*ended - *begun);
    return OK;
}

/* How the bindings find all of it */

typedef struct {
    const char *name;
    void *function;
    int since;
} Entry;

#define AS(name, function, since) {name, (void *)function, since}

int cuGetProcAddress_v2(const char *symbol, void **found, int wanted, uint64_t flags, int *status)
{
    static const Entry ENTRIES[] = {
        AS("cuInit", cuInit, 2000),
        AS("cuDriverGetVersion", cuDriverGetVersion, 2020),
        AS("cuGetErrorName", cuGetErrorName, 6000),
        AS("cuGetErrorString", cuGetErrorString, 6000),
        AS("cuGetProcAddress", cuGetProcAddress_v2, 12000),
        AS("cuDeviceGet", cuDeviceGet, 2000),
        AS("cuDeviceGetCount", cuDeviceGetCount, 2000),
        AS("cuDeviceGetName", cuDeviceGetName, 2000),
        AS("cuDeviceGetUuid", cuDeviceGetUuid_v2, 11040),
        AS("cuDeviceTotalMem", cuDeviceTotalMem_v2, 3020),
        AS("cuDeviceGetAttribute", cuDeviceGetAttribute, 2000),
        AS("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain, 7000),
        AS("cuDevicePrimaryCtxRelease", cuDevicePrimaryCtxRelease_v2, 11000),
        AS("cuDeviceGetDevResource", cuDeviceGetDevResource, GREEN_SINCE),
        AS("cuDevSmResourceSplitByCount", cuDevSmResourceSplitByCount, GREEN_SINCE),
        AS("cuDevResourceGenerateDesc", cuDevResourceGenerateDesc, GREEN_SINCE),
        AS("cuGreenCtxCreate", cuGreenCtxCreate, GREEN_SINCE),
        AS("cuGreenCtxDestroy", cuGreenCtxDestroy, GREEN_SINCE),
        AS("cuGreenCtxGetDevResource", cuGreenCtxGetDevResource, GREEN_SINCE),
        AS("cuGreenCtxStreamCreate", cuGreenCtxStreamCreate, 12050),
        AS("cuStreamGetGreenCtx", cuStreamGetGreenCtx, 12040),
        AS("cuStreamDestroy", cuStreamDestroy_v2, 4000),
        AS("cuStreamSynchronize", cuStreamSynchronize, 2000),
        AS("cuStreamBeginCapture", cuStreamBeginCapture_v2, 10010),
        AS("cuStreamEndCapture", cuStreamEndCapture, 10000),
        AS("cuGraphInstantiateWithFlags", cuGraphInstantiateWithFlags, 11040),
        AS("cuGraphLaunch", cuGraphLaunch, 10000),
        AS("cuCtxSetCurrent", cuCtxSetCurrent, 4000),
        AS("cuCtxSynchronize", cuCtxSynchronize, 2000),
        AS("cuMemAlloc", cuMemAlloc_v2, 3020),
        AS("cuMemFree", cuMemFree_v2, 3020),
        AS("cuMemGetInfo", cuMemGetInfo_v2, 3020),
        AS("cuMemsetD32", cuMemsetD32_v2, 3020),
        AS("cuMemcpyDtoH", cuMemcpyDtoH_v2, 3020),
        AS("cuModuleLoadData", cuModuleLoadData, 2000),
        AS("cuModuleGetFunction", cuModuleGetFunction, 2000),
        AS("cuLaunchKernel", cuLaunchKernel, 4000),
        AS("cuEventCreate", cuEventCreate, 2000),
        AS("cuEventRecord", cuEventRecord, 2000),
        AS("cuEventElapsedTime", cuEventElapsedTime_v2, 12080),
    };
    (void)flags;
    *found = NULL;
    for (size_t i = 0; i < sizeof ENTRIES / sizeof *ENTRIES; i++)
        if (!strcmp(ENTRIES[i].name, symbol) && ENTRIES[i].since <= version() && ENTRIES[i].since <= wanted)
            *found = ENTRIES[i].function;
    if (status)
        *status = *found ? 0 : 1;
    return *found ? OK : NOT_FOUND;
}
