//! The store in a bucket: what a folder does, over the protocol of S3, from a server on this machine that keeps its buckets in a folder.

use super::*;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use object_store::aws::AmazonS3Builder;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;

const KEY: &str = "a-key";
const SECRET: &str = "a-secret";

/// Serves the folders in `root` as buckets, for as long as the test's runtime lives. Returns the endpoint.
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

/// As [`fixture`], in a bucket whose keys are paths in the fixture's folder.
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
async fn large_objects_go_up_and_come_down_in_parts() {
    goes_up_in_parts(in_bucket().await).await;
}

#[tokio::test]
async fn what_a_bucket_does_not_copy_is_carried() {
    let f = in_bucket().await;
    let bytes: Vec<u8> = (0..20 << 20).map(|i: u32| (i % 251) as u8).collect();
    let object = f.store.put_object(POLICY, &bytes.clone().into()).await.unwrap();
    let (place, trash) = (
        object_key(POLICY, &object.digest).unwrap(),
        Path::from("policy/demo/trash/x"),
    );
    f.store.carry(&object, &place, &trash).await.unwrap();
    assert!(!f.object_path(&object).exists());
    assert!(std::fs::read(f.path(trash.as_ref())).unwrap() == bytes);
    let again = f.store.carry(&object, &place, &trash).await;
    assert!(matches!(again, Err(Error::NotFound(_))), "{again:?}");
}

#[tokio::test]
async fn a_collection_leaves_what_is_live_and_empties_its_trash() {
    collection::live_stays_whole(in_bucket().await).await;
}

#[tokio::test]
async fn a_chain_is_listed_beyond_one_page_and_a_prefix_is_a_store_of_its_own() {
    let f = in_bucket().await;
    let endpoint = serve(&f.folder.path().join("new")).await;
    let within = |prefix: &str| Store::open_bucket(&format!("s3://store/{prefix}"), access(&endpoint, SECRET)).unwrap();
    let (one, other) = (within("team/one"), within("team/other"));
    // a page has 1,000 keys
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
async fn a_wrong_secret_and_a_bucket_that_is_not_there_are_said() {
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
fn an_upload_has_no_more_parts_than_s3_takes() {
    for size_bytes in [64 << 20, 160 << 30, (160 << 30) + 1, 2 << 40, 5 << 40] {
        let part_bytes = objects::upload_part_bytes(size_bytes) as u64;
        assert!(size_bytes.div_ceil(part_bytes) <= 10_000, "{size_bytes}");
        assert!((16 << 20..=5 << 30).contains(&part_bytes), "{size_bytes}");
    }
}
