//! The store in a bucket behaves as in a folder. A local S3 server keeps its buckets in a folder.

use super::*;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use object_store::aws::AmazonS3Builder;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;

const KEY: &str = "a-key";
const SECRET: &str = "a-secret";

/// Serves the folders in `root` as buckets while the test's runtime lives. Returns the endpoint.
async fn serve(root: &std::path::Path) -> String {
    let service = {
        let mut builder = S3ServiceBuilder::new(FileSystem::new(root).unwrap());
        builder.set_auth(SimpleAuth::from_single(KEY, SECRET));
        builder.build()
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            let service = service.clone();
            tokio::spawn(async move {
                let server = Builder::new(TokioExecutor::new());
                let _ = server.serve_connection(TokioIo::new(connection), service).await;
            });
        }
    });
    endpoint
}

fn access(endpoint: &str, secret: &str) -> AmazonS3Builder {
    AmazonS3Builder::new()
        .with_endpoint(endpoint)
        .with_allow_http(true)
        .with_region("us-east-1")
        .with_access_key_id(KEY)
        .with_secret_access_key(secret)
}

/// [`fixture`] in a bucket whose keys are paths in the fixture's folder.
async fn in_bucket() -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("new");
    std::fs::create_dir_all(root.join("store")).unwrap();
    let endpoint = serve(&root).await;
    Fixture {
        store: Store::open_bucket("s3://store", access(&endpoint, SECRET)).unwrap(),
        folder,
        key: SigningKey::from_seed(&[1; 32]),
    }
}

#[tokio::test]
async fn objects_and_documents_are_written_once_and_found_missing() {
    an_object_is_written_once(in_bucket().await).await;
    a_document_is_written_once(in_bucket().await).await;
}

#[tokio::test]
async fn large_objects_are_uploaded_and_downloaded_in_parts() {
    uploads_in_parts(in_bucket().await).await;
}

#[tokio::test]
async fn objects_that_a_bucket_cannot_copy_go_through_this_process() {
    let f = in_bucket().await;
    let bytes: Vec<u8> = (0..20 << 20).map(|i: u32| (i % 251) as u8).collect();
    let object = f.store.put_object(POLICY, &bytes.clone().into()).await.unwrap();
    let (place, trash) = (
        object_key(POLICY, &object.digest).unwrap(),
        Path::from("policy/demo/trash/x"),
    );
    f.store.copy_and_delete(&object, &place, &trash).await.unwrap();
    assert!(!f.object_path(&object).exists());
    assert!(std::fs::read(f.path(trash.as_ref())).unwrap() == bytes);
    let again = f.store.copy_and_delete(&object, &place, &trash).await;
    assert!(matches!(again, Err(Error::NotFound(_))), "{again:?}");
}

#[tokio::test]
async fn gc_in_a_bucket_keeps_live_versions_and_empties_its_trash() {
    gc::gc_keeps_live_versions(in_bucket().await).await;
}

#[tokio::test]
async fn a_chain_is_listed_beyond_one_page_and_a_prefix_is_a_store_of_its_own() {
    let f = in_bucket().await;
    let endpoint = serve(&f.folder.path().join("new")).await;
    let within = |prefix: &str| Store::open_bucket(&format!("s3://store/{prefix}"), access(&endpoint, SECRET)).unwrap();
    let (one, other) = (within("team/one"), within("team/other"));
    // A page of a listing has 1,000 keys.
    let bytes = |i: u32| Bytes::copy_from_slice(&i.to_le_bytes());
    for i in 0..1_100 {
        one.put_object(POLICY, &bytes(i)).await.unwrap();
    }
    let catalog = one.catalog(POLICY, &f.trusted()).await.unwrap();
    assert_eq!(catalog.objects.len(), 1_100);
    assert!(other.catalog(POLICY, &f.trusted()).await.unwrap().objects.is_empty());
    let object = ObjectRef::of(&bytes(7));
    assert_eq!(one.get_object(POLICY, &object).await.unwrap(), bytes(7));
    assert!(matches!(
        other.get_object(POLICY, &object).await,
        Err(Error::NotFound(_))
    ));
}

#[tokio::test]
async fn a_wrong_secret_and_a_missing_bucket_are_reported() {
    let f = in_bucket().await;
    let endpoint = serve(&f.folder.path().join("new")).await;
    let bytes = Bytes::from_static(b"some bytes");
    let stranger = Store::open_bucket("s3://store", access(&endpoint, "guessed")).unwrap();
    let error = stranger.put_object(POLICY, &bytes).await.unwrap_err();
    assert!(format!("{error:?}").contains("SignatureDoesNotMatch"), "{error:?}");
    let nowhere = Store::open_bucket("s3://no-such-bucket", access(&endpoint, SECRET)).unwrap();
    let error = nowhere.catalog(POLICY, &f.trusted()).await.unwrap_err();
    assert!(format!("{error:?}").contains("NoSuchBucket"), "{error:?}");
}

#[test]
fn an_upload_has_no_more_parts_than_s3_allows() {
    for size_bytes in [64 << 20, 160 << 30, (160 << 30) + 1, 2 << 40, 5 << 40] {
        let part_bytes = objects::upload_part_bytes(size_bytes) as u64;
        assert!(size_bytes.div_ceil(part_bytes) <= 10_000, "{size_bytes}");
        assert!((16 << 20..=5 << 30).contains(&part_bytes), "{size_bytes}");
    }
}
