/* Where blocks run, and work that only computes. */

extern "C" __global__ void where(unsigned *blocks, long long cycles)
{
    unsigned multiprocessor;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    long long begun = clock64();
    while (clock64() - begun < cycles)
        ;
    if (threadIdx.x == 0)
        atomicAdd(&blocks[multiprocessor], 1u);
}

extern "C" __global__ void compute(float *out, int rounds)
{
    float a = threadIdx.x, b = a + 1, c = a + 2, d = a + 3;
    for (int i = 0; i < rounds; i++) {
        a = a * 0.999f + 0.5f;
        b = b * 0.999f + 0.5f;
        c = c * 0.999f + 0.5f;
        d = d * 0.999f + 0.5f;
    }
    if (a + b + c + d < 0) /* never, which the compiler does not know */
        *out = a;
}
