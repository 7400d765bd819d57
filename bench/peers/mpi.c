/* MPI_Allreduce, float32 sum, in place, one blocking call after another. One
   JSON line a size, from rank 0. Environment: TANDEM_PEER_SIZES (bytes, comma
   separated) and TANDEM_PEER_SECONDS (a row). */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int order(const void *a, const void *b) {
	double x = *(const double *)a, y = *(const double *)b;
	return x < y ? -1 : x > y;
}

static void measure(size_t bytes, double seconds, int rank, int ranks) {
	int n = (int)(bytes / 4), wrong = 0;
	float *x = malloc(bytes + 4);
	for (int i = 0; i < n; i++)
		x[i] = (float)(rank + 1);
	MPI_Allreduce(MPI_IN_PLACE, x, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
	for (int i = 0; i < n; i++)
		wrong += x[i] != (float)(ranks * (ranks + 1)) / 2;
	memset(x, 0, bytes);
	for (int i = 0; i < 2; i++)
		MPI_Allreduce(MPI_IN_PLACE, x, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
	double begin = MPI_Wtime();
	MPI_Allreduce(MPI_IN_PLACE, x, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
	double took = MPI_Wtime() - begin;
	MPI_Allreduce(MPI_IN_PLACE, &took, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
	double want = seconds / (took > 1e-7 ? took : 1e-7);
	int calls = want < 5 ? 5 : want > 3000 ? 3000 : (int)want;
	double *t = malloc(sizeof *t * (size_t)calls), sum = 0;
	MPI_Barrier(MPI_COMM_WORLD);
	for (int i = 0; i < calls; i++) {
		begin = MPI_Wtime();
		MPI_Allreduce(MPI_IN_PLACE, x, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
		t[i] = (MPI_Wtime() - begin) * 1e6;
		sum += t[i];
	}
	qsort(t, (size_t)calls, sizeof *t, order);
	int p99 = (int)(0.99 * calls);
	double m[4] = {sum / calls, t[calls / 2], t[p99 < calls ? p99 : calls - 1], t[calls - 1]};
	MPI_Allreduce(MPI_IN_PLACE, m, 4, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
	if (rank == 0) {
		printf("{\"bytes\":%zu,\"count\":%d,\"iters\":%d,\"wrong\":%d,\"avg_us\":%.3f,\"p50_us\":%.3f,\"p99_us\":%.3f,\"max_us\":%.3f}\n",
		       bytes, n, calls, wrong, m[0], m[1], m[2], m[3]);
		fflush(stdout);
	}
	free(x);
	free(t);
}

int main(int argc, char **argv) {
	int rank, ranks;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	char *sizes = strdup(getenv("TANDEM_PEER_SIZES"));
	double seconds = atof(getenv("TANDEM_PEER_SECONDS"));
	for (char *s = strtok(sizes, ","); s; s = strtok(NULL, ","))
		measure((size_t)atoll(s), seconds, rank, ranks);
	free(sizes);
	MPI_Finalize();
	return 0;
}
